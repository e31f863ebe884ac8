// Copies of many pieces in one launch. hiprtc and nvrtc both compile this file; it includes nothing.
//
// A grid is (chunks of the longest piece, pieces). Nothing depends on the wave size (32 or 64): threads of a block
// do not talk to each other. No piece of a launch may write what another piece of the same launch reads or writes.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Row {
    u64 target;
    u64 source;
    u64 bytes;
};

// As many rows as fit into 4 KiB of kernel arguments, beside the other arguments.
#define ROWS_BY_VALUE 64

struct Rows {
    Row row[ROWS_BY_VALUE];
};

#define VECTOR 16
#define UNROLL 4

// Copies bytes [begin, end) of a row with all threads of the block.
static __device__ void copy_chunk(const Row & row, u64 begin, u64 end) {
    if (end > row.bytes) {
        end = row.bytes;
    }
    if (begin >= end) {
        return;
    }
    u8 * target = (u8 *) (row.target + begin);
    const u8 * source = (const u8 *) (row.source + begin);
    u64 bytes = end - begin;
    u64 thread = threadIdx.x, threads = blockDim.x;

    if (((u64) target - (u64) source) % VECTOR != 0) {
        // Vectors would be misaligned on one side, but words may be aligned on both.
        if (((u64) target | (u64) source | bytes) % 4 == 0) {
            for (u64 i = thread; i < bytes / 4; i += threads) {
                ((u32 *) target)[i] = ((const u32 *) source)[i];
            }
        } else {
            for (u64 i = thread; i < bytes; i += threads) {
                target[i] = source[i];
            }
        }
        return;
    }

    u64 head = (VECTOR - (u64) target % VECTOR) % VECTOR;
    if (head > bytes) {
        head = bytes;
    }
    for (u64 i = thread; i < head; i += threads) {
        target[i] = source[i];
    }
    u64 vectors = (bytes - head) / VECTOR;
    uint4 * to = (uint4 *) (target + head);
    const uint4 * from = (const uint4 *) (source + head);
    u64 i = thread;
    // Several loads are in flight before the first store, because the bus has a long latency.
    for (; i + (UNROLL - 1) * threads < vectors; i += UNROLL * threads) {
        uint4 a = from[i];
        uint4 b = from[i + threads];
        uint4 c = from[i + 2 * threads];
        uint4 d = from[i + 3 * threads];
        to[i] = a;
        to[i + threads] = b;
        to[i + 2 * threads] = c;
        to[i + 3 * threads] = d;
    }
    for (; i < vectors; i += threads) {
        to[i] = from[i];
    }
    for (u64 k = head + vectors * VECTOR + thread; k < bytes; k += threads) {
        target[k] = source[k];
    }
}

// Rows first .. first + n of a table in device memory.
extern "C" __global__ void move_rows(const Row * table, u32 first, u32 n, u32 chunk_bytes) {
    for (u32 y = blockIdx.y; y < n; y += gridDim.y) {
        u64 begin = (u64) blockIdx.x * chunk_bytes;
        copy_chunk(table[first + y], begin, begin + chunk_bytes);
    }
}

// Does the same with the rows as an argument, so that nothing has to be uploaded or kept until the launch is done.
extern "C" __global__ void move_rows_by_value(Rows rows, u32 n, u32 chunk_bytes) {
    for (u32 y = blockIdx.y; y < n; y += gridDim.y) {
        u64 begin = (u64) blockIdx.x * chunk_bytes;
        copy_chunk(rows.row[y], begin, begin + chunk_bytes);
    }
}
