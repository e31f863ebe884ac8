"""The tiers that hold expert bytes, and the manager that lends them out.

    manager.py      the tiers of one model: leases, engines, the boundary, prefetches, statistics
    admission.py    the transaction that brings experts into slots
    filler.py       the serving of its misses: batches of what L2 has; fill_workers.py has the threads
    boundary.py     when slots give way to computing; relayout.py moves them
    table.py        which bytes of the GGUF belong to which expert
    slab.py         L1: the slots on the device; slot_layout.py says how a slot holds an expert
    host_pool.py    L2: copies in pinned host memory
    file_source.py  L3 and L4: the file
    config.py       the user's wishes; budget.py turns them into bytes

The three stores (`slab`, `host_pool`, `file_source`) do not know each other; only the manager knows them all.
docs/architecture.md lists all files.
"""
