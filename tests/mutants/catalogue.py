"""The bugs that the harness must catch, by what they break."""

from __future__ import annotations

from mutants.mutant import MACHINE, Mutant
from mutants.replays import REPLAYS
from mutants.trust import TRUST

_FILES = ("tests/tiers/file/test_file_changes.py", "tests/tiers/file/test_source.py")
_WAIT = "            if stream is None:\n                fence.wait()\n"
_HOLD = "            elif not fence.done():\n                fence.make_wait(stream)\n"
_TOGETHER = (MACHINE, "tests/tiers/fill/test_fills_together.py")
_ARENA = ("tests/hip/gpu/test_resizing_arena.py",)
_POOL = (MACHINE, "tests/machines/test_host_pool_machine.py")

LAYOUT = (
    Mutant(
        "a range is one slot short",
        "tiers/model/slot_layout.py",
        "return round_up(n_slots * stride + GUARD_BYTES, RANGE_ALIGNMENT)",
        "return round_up((n_slots - 1) * stride + GUARD_BYTES, RANGE_ALIGNMENT)",
    ),
    Mutant(
        "an expert's span begins one byte late",
        "tiers/model/matrix.py",
        "Span(self.file_offset + expert * self.expert_bytes,",
        "Span(self.file_offset + expert * self.expert_bytes + 1,",
        ("tests/tiers/model/test_table.py", "tests/tiers/test_manager.py"),
    ),
    Mutant(
        "slots reach into the compute region",
        "tiers/slots/arena_layout.py",
        "if self.used_bytes > slab_bytes - compute_bytes:",
        "if self.used_bytes > slab_bytes:",
    ),
    Mutant(
        "a reserved byte too few",
        "tiers/slots/boundary.py",
        "        compute_bytes = round_up(compute_bytes, RANGE_ALIGNMENT)\n",
        "        compute_bytes = compute_bytes // RANGE_ALIGNMENT * RANGE_ALIGNMENT\n",
    ),
    Mutant(
        "guards are not zeroed after a move",
        "tiers/slots/slab.py",
        "self._relocator.relocate(moves, zeros, stream)",
        "self._relocator.relocate(moves, zeros[:0], stream)",
    ),
    Mutant(
        "heads of free slots are not zeroed after a move",
        "tiers/slots/move_runs.py",
        "        for slot in range(n_slots):\n",
        "        for slot in range(0):\n",
    ),
    Mutant(
        "a failed move forgets its guards",
        "tiers/slots/slab.py",
        "        self.stale_guards = True  # until",
        "        self.stale_guards = False  # until",
        (MACHINE, "tests/tiers/slots/test_slab.py"),
    ),
)

MOVES = (
    Mutant(
        "upward moves begin at the wrong end",
        "tiers/slots/move_runs.py",
        "    end = n_up\n",
        "    end = n_up\n    runs[:n_up] = runs[:n_up][::-1].copy()\n",
    ),
    Mutant(
        "downward moves begin at the wrong end",
        "tiers/slots/move_runs.py",
        "    return end\n",
        "    runs[n_up:end] = runs[n_up:end][::-1].copy()\n    return end\n",
    ),
    Mutant(
        "the experts of the lowest rank survive",
        "planner/policy/repack_calls.py",
        "and view.order[slot] >= threshold:",
        "and (n_residents <= n_new or end - begin < n_new):",
    ),
    Mutant(
        "a failed move keeps the experts that it overwrote",
        "tiers/slots/relayout.py",
        "intact = in_place(self._slab.still_there(new, survivors))",
        "intact = in_place(survivors)",
    ),
    Mutant(
        "a failed plan's quotas stay",
        "tiers/slots/boundary.py",
        "            if self._slab.layout is layout:\n                self._quotas = quotas\n",
        "",
    ),
    Mutant(
        "no hysteresis",
        "tiers/slots/boundary.py",
        "if not now and (pays_at is None or self._bytes_missed() < pays_at):",
        "if not now and pays_at is None:",
    ),
    Mutant(
        "the boundary never comes down by itself",
        "tiers/slots/boundary.py",
        "return self._bytes_missed() + gained if gained else None",
        "return None",
    ),
    Mutant(
        "a reservation's stream does not wait for a move that is queued",
        "tiers/slots/boundary.py",
        "        self._relayout.let_in(stream)\n",
        "",
    ),
    Mutant(
        "what a move drops is not touched in L2",
        "tiers/slots/relayout.py",
        "        self._pool.touch(dropped)\n",
        "",
    ),
    Mutant(
        "nobody waits for a move that was queued without a stream",
        "tiers/slots/relayout.py",
        "        finally:\n            self._slab.finish()\n",
        "        finally:\n            pass\n",
        ("tests/tiers/slots/test_queued_relayout.py",),
    ),
    Mutant(
        "slots move under leases, of which nobody took note",
        "tiers/access/usage.py",
        "                self._leases.add(lease)\n                return\n",
        "                return\n",
    ),
    Mutant(
        "a smaller arena keeps its memory",
        "tiers/slots/boundary.py",
        "                self._slab.fit()\n",
        "                pass\n",
        _ARENA,
    ),
    Mutant(
        "slots move into memory that is not there yet",
        "tiers/slots/boundary.py",
        "            self._slab.admit(size)\n",
        "",
        _ARENA,
    ),
    Mutant(
        "a slab of another size believes in its old one",
        "tiers/slots/slab.py",
        "        self._layout, self._n_bytes = new, new.slab_bytes\n",
        "        self._layout = new\n",
        _ARENA,
    ),
)

FENCES = (
    Mutant(
        "a fill does not wait for readers",
        "tiers/slots/fences.py",
        "                    pending.update((fence, None) for on, fence in reads.items() if on != stream)\n",
        "                    pass\n",
    ),
    Mutant(
        "a reader does not wait for the fill",
        "tiers/slots/fences.py",
        _WAIT + _HOLD,
        _WAIT,
    ),
    Mutant(
        "a lease without a stream does not wait",
        "tiers/slots/fences.py",
        _WAIT + _HOLD,
        "            if stream is not None:\n                fence.make_wait(stream)\n",
    ),
    Mutant(
        "a release notes no reader",
        "tiers/slots/fences.py",
        "                self._reads.setdefault((layer, slot), {})[stream] = fence\n",
        "                pass\n",
    ),
    Mutant(
        "a move does not wait for readers",
        "tiers/slots/fences.py",
        "                pending.update(dict.fromkeys(reads.values()))\n",
        "                pass\n",
    ),
    Mutant(
        "nobody waits for a move",
        "tiers/slots/fences.py",
        "            self._forget()\n            self._moved = fence\n",
        "            self._forget()\n            self._moved = None\n",
    ),
    Mutant(
        "an interrupted fence leaves its copy queued",
        "tiers/slots/fences.py",
        "            self._device.synchronize()\n            raise\n",
        "            raise\n",
        ("tests/tiers/slots/test_fences.py",),
    ),
    Mutant(
        "a block is used again while a queued copy reads it",
        "tiers/fill/filler.py",
        "            self._pool.end_fill(handle, fence)\n",
        "            self._pool.end_fill(handle)\n",
    ),
    Mutant(
        "blocks of a batch are used again while its queued copies read them",
        "tiers/fill/filler.py",
        "            self._pool.release_copies(copies, fence)\n",
        "            self._pool.release_copies(copies)\n",
        _TOGETHER,
    ),
    Mutant(
        "a batch waits for the readers of its first slot only",
        "tiers/slots/fences.py",
        "            pending = dict.fromkeys([self._moved])  # an ordered set, as slots filled together share a fence\n"
        "            for slot in slots:\n",
        "            pending = dict.fromkeys([self._moved])  # an ordered set, as slots filled together share a fence\n"
        "            for slot in list(slots)[:1]:\n",
        _TOGETHER,
    ),
    Mutant(
        "a batch's end is noted for its first slot only",
        "tiers/slots/fences.py",
        "            for slot in slots:\n                self._written[layer, slot] = fence\n",
        "            for slot in list(slots)[:1]:\n                self._written[layer, slot] = fence\n",
        _TOGETHER,
    ),
    Mutant(
        "what has left L2 before its copy is acquired is not filled",
        "tiers/fill/filler.py",
        "                self.fill_one(layer, experts[index], slots[index])\n",
        "                pass\n",
        _TOGETHER,
    ),
    Mutant(
        "an acquired copy may be evicted",
        "tiers/host_pool/pool.py",
        "                    copies.blocks.append(block)\n                    self._begin_use(block)\n",
        "                    copies.blocks.append(block)\n                    self._begin_use(block)\n"
        "                    block.users -= 1\n",
        ("tests/tiers/host_pool/test_fences.py",),
    ),
    Mutant(
        "copies are queued after one that failed",
        "hip/gpu/moves/copy_loop.py",
        "        if code:\n            return code\n    return 0\n",
        "    return code if len(moves) else 0\n",
        ("tests/hip/gpu/test_many_copies.py",),
    ),
    Mutant(
        "a failed copy leaves its first pieces queued",
        "tiers/slots/transfer.py",
        "            if self._device.has_streams:\n                self._device.synchronize()\n            raise\n",
        "            raise\n",
        ("tests/tiers/fill/test_faults.py",),
    ),
    Mutant(
        "an engine is bound before queued copies are there",
        "tiers/engine/use.py",
        "            self._parts.device.synchronize()  # an engine reads READY slots at once",
        "            pass  # an engine reads READY slots at once",
    ),
    Mutant(
        "an engine's hit is a copy that is still queued",
        "tiers/fill/misses.py",
        "        if self._usage.bound:\n            self._fences.before_read(layer, slots.tolist(), None)\n",
        "",
        ("tests/tiers/fill/test_prefetch.py",),
    ),
)

TABLES = (
    Mutant(
        "a victim stays in the table",
        "planner/policy/policy.py",
        "        view.slot_of[former] = -1\n",
        "        pass\n",
    ),
    Mutant(
        "a failed fill leaks its pins",
        "tiers/fill/admission.py",
        "            self._residency.abort_held(self._locks, layer, held)\n",
        "",
    ),
    Mutant(
        "a failed fill is declared complete",
        "tiers/fill/admission.py",
        "            self._residency.abort_held(self._locks, layer, held)\n",
        "            self._residency.finish_held(self._locks, layer, held)\n",
    ),
    Mutant(
        "a lease is released twice",
        "tiers/access/lease.py",
        "            self._require_live()\n        try:\n",
        "            pass\n        try:\n",
    ),
    Mutant(
        "a refused stream leaks the pins",
        "tiers/access/lease.py",
        "                    self._holder.abandon_group(self, held)\n",
        "                    pass\n",
        ("tests/tiers/fill/test_faults.py::test_a_part_that_its_stream_refuses_is_let_go",),
    ),
    Mutant(
        "what is being filled counts as there",
        "planner/policy/policy.py",
        "                ready &= view.state[slot]\n",
        "                pass\n",
    ),
    Mutant(
        "a victim may be pinned",
        "planner/policy/policy.py",
        "lowest = min(lowest, view.order[slot] | (np.int64(view.pins[slot] != 0) << PINNED_BIT))",
        "lowest = min(lowest, view.order[slot])",
    ),
    Mutant(
        "prefetched experts outlive those that were asked for",
        "planner/policy/policy.py",
        "        return _BUSY\n    _occupy(view, slot, expert, SPECULATIVE)\n"
        "    view.order[slot] = (RANK_SPECULATIVE << SLOT_BITS) | slot\n    return slot\n\n\n"
        "@compiled\ndef begin_prefetch_into",
        "        return _BUSY\n    _occupy(view, slot, expert, SPECULATIVE)\n"
        "    view.order[slot] = (255 << 38 << SLOT_BITS) | slot\n    return slot\n\n\n"
        "@compiled\ndef begin_prefetch_into",
    ),
    Mutant(
        "wasted bytes are not counted",
        "planner/policy/policy.py",
        "            view.counters[WASTED] += 1\n",
        "            pass\n",
    ),
    Mutant(
        "an eviction is counted twice",
        "planner/policy/policy.py",
        "        view.counters[EVICTIONS] += 1\n",
        "        view.counters[EVICTIONS] += 2\n",
    ),
)

HOST = (
    Mutant(
        "a failed allocation keeps its bytes of the budget",
        "tiers/host_pool/chunk_store.py",
        "                self._end_move(n_bytes)\n                self._budget.release(self.account, n_bytes)\n",
        "                self._end_move(n_bytes)\n",
        ("tests/tiers/host_pool/test_allocator.py",),
    ),
    Mutant(
        "the bounce minimum is counted wrong",
        "tiers/host_pool/bounce_blocks.py",
        "                budget.add_bounce(account, n_bytes)\n",
        "                budget.add_bounce(account, n_bytes // 2)\n",
    ),
    Mutant(
        "chunks are counted as asked for, not as the allocator rounds them",
        "tiers/host_pool/chunk_store.py",
        "        n_bytes = self._device.pinned_allocation_bytes(n_blocks * size.block_bytes) if n_blocks else 0\n",
        "        n_bytes = n_blocks * size.block_bytes if n_blocks else 0\n",
    ),
    Mutant(
        "a pool does not shrink when it is resized",
        "tiers/host_pool/chunk_store.py",
        "        self._budget.set_claim(self.account, self._claim(budget_bytes))\n",
        "        self.account.claim_bytes = self._claim(budget_bytes)\n",
        _POOL,
    ),
    Mutant(
        "a failed read leaves a copy in L2",
        "tiers/fill/filler.py",
        "        self._read(layer, expert, [handle.address + begin for begin in begins], places)\n"
        "        self._pool.complete_fill(handle)\n",
        "        self._pool.complete_fill(handle)\n"
        "        self._read(layer, expert, [handle.address + begin for begin in begins], places)\n",
    ),
    Mutant(
        "L2 evicts a block that a queued copy reads",
        "tiers/host_pool/size_class.py",
        "if not block.users and block.is_quiet()",
        "if not block.users",
        _POOL,
    ),
    Mutant(
        "a bounce block is used while a queued copy reads it",
        "tiers/host_pool/bounce_blocks.py",
        "            if block.is_quiet():\n                return block\n",
        "            if True:\n                return block\n",
    ),
    Mutant(
        "an eviction from L1 does not touch the copy in L2",
        "tiers/fill/misses.py",
        "        self._pool.touch((layer, expert) for expert in self._residency.experts_evicted_by(layer, slots))\n",
        "",
    ),
    Mutant(
        "two fills read one expert at a time",
        "tiers/host_pool/pool.py",
        "            if block.state is BlockState.RESIDENT:\n                self._use_copy(handle, block)\n"
        "            else:\n                wait_interruptibly(self._changed)\n            return None\n",
        "            self._use_copy(handle, block)\n            return None\n",
        ("tests/tiers/host_pool/test_pool.py", "tests/tiers/fill/test_prefetch.py"),
    ),
)

FILES_AND_THREADS = (
    Mutant(
        "a file that was written to is believed",
        "tiers/model/file_identity.py",
        "            stat.st_mtime_ns == self.mtime_ns\n            and stat.st_size == self.n_bytes\n",
        "            stat.st_size == self.n_bytes\n",
        _FILES,
    ),
    Mutant(
        "close does not join the fill threads",
        "tiers/fill/workers.py",
        "            thread.join()\n",
        "            pass\n",
        ("tests/tiers/fill/test_workers.py", "tests/testing/test_soak.py"),
    ),
    Mutant(
        "drain returns while a prefetch still runs",
        "tiers/fill/workers.py",
        "            while self._background or self._background_running:\n",
        "            while self._background:\n",
        ("tests/tiers/fill/test_workers.py", "tests/tiers/fill/test_prefetch.py"),
    ),
    Mutant(
        "a failed read counts as bytes read",
        "tiers/file/counted_source.py",
        "                self._failures += 1\n            raise\n",
        "                self._failures += 1\n                self._bytes_read += span.n_bytes\n            raise\n",
        (MACHINE, "tests/tiers/fill/test_faults.py"),
    ),
    Mutant(
        "a mode that was given up is given up again by the next thread",
        "tiers/file/source.py",
        "            if self._reader is not reader:\n                return\n",
        "",
        ("tests/tiers/file/modes/test_direct.py",),
    ),
    Mutant(
        "cancelled prefetches are not forgotten",
        "tiers/fill/prefetcher.py",
        "            self._waiting.difference_update(cancelled)\n",
        "            pass\n",
    ),
)

_INTERRUPTED = ("tests/tiers/test_interrupted.py",)

INTERRUPTS = (
    Mutant(
        "a release is interrupted before it begins",
        "tiers/access/lease.py",
        "    @not_interrupted_at_entry\n    def release(",
        "    def release(",
        _INTERRUPTED,
    ),
    Mutant(
        "a release that is interrupted is not finished",
        "tiers/access/lease.py",
        "            with interrupts_deferred():\n                self._end()\n            raise\n",
        "            raise\n",
        _INTERRUPTED,
    ),
    Mutant(
        "an interrupt comes between acquire and the block",
        "tiers/access/lease.py",
        "        if self._released:  # if not, nothing is called, so that no interrupt comes before the `with` block\n"
        "            self._require_live()\n",
        "        self._require_live()\n",
        _INTERRUPTED,
    ),
    Mutant(
        "an acquire that is interrupted keeps its lease",
        "tiers/manager.py",
        "            lease.abandon()\n            raise\n",
        "            raise\n",
        _INTERRUPTED,
    ),
    Mutant(
        "misses are served where interrupts come",
        "tiers/access/lease.py",
        "                with interrupts_deferred():\n"
        "                    self._holder.release_group(self, self._held)\n",
        "                if True:\n                    self._holder.release_group(self, self._held)\n",
        _INTERRUPTED,
    ),
    Mutant(
        "slots that hits have taken are not noted as pinned",
        "planner/policy/calls/locked_calls.py",
        "            if status == 0:\n                held[n] = 1\n",
        "",
        _INTERRUPTED,
    ),
    Mutant(
        "tiers whose opening is interrupted stay allocated",
        "tiers/manager.py",
        "    @opening\n",
        "",
        _INTERRUPTED,
    ),
    Mutant(
        "a close that is interrupted is not finished",
        "tiers/manager.py",
        "    @completing\n    def close(",
        "    def close(",
        _INTERRUPTED,
    ),
    Mutant(
        "a child of fork waits for threads that are not there",
        "tiers/access/usage.py",
        "        usage.note_fork()\n",
        "        pass\n",
        _INTERRUPTED,
    ),
    Mutant(
        "a drain cannot be interrupted",
        "tiers/fill/workers.py",
        "                wait_interruptibly(self._changed)\n",
        "                self._changed.wait()\n",
        _INTERRUPTED,
    ),
)

_SHARDS = (
    "tests/tiers/split/test_tensor_cut.py",
    "tests/tiers/split/test_split_source.py",
    "tests/tiers/test_shard_division.py",
)

SHARDS = (
    Mutant(
        "what was read for another device is thrown away",
        "tiers/split/split_source.py",
        "self._waiting.put((ref, other), shard)",
        "pass",
        _SHARDS,
    ),
    Mutant(
        "two devices read one matrix at a time",
        "tiers/split/split_source.py",
        "and ref in self._reading:",
        "and False:",
        _SHARDS,
    ),
    Mutant(
        "the pieces of a shard lie on top of each other",
        "tiers/split/tensor_cut.py",
        "at += end - begin",
        "at = 0",
        _SHARDS,
    ),
    Mutant(
        "a cut inside of a block is taken",
        "tiers/split/tensor_cut.py",
        "if edge % block:",
        "if False:",
        _SHARDS,
    ),
    Mutant(
        "kernels may read past a row into bytes of another type",
        "tiers/model/slot_layout.py",
        "wasteful or not _can_be_read_past(matrices, offsets, stride)",
        "wasteful",
        ("tests/tiers/model/test_slot_layout.py",),
    ),
)

MUTANTS = (
    *LAYOUT,
    *MOVES,
    *FENCES,
    *TABLES,
    *INTERRUPTS,
    *HOST,
    *FILES_AND_THREADS,
    *SHARDS,
    *REPLAYS,
    *TRUST,
)
