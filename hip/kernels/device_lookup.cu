// The look-up of one layer: turns the router's expert ids into slot ids by the residency table, and holds its stream
// while experts are missing, until the host has answered. hiprtc and nvrtc both compile this file; it includes nothing.
//
// It runs as one block of at least `n_rows` threads (64 rows at most). `mailbox` is host memory: the host polls it and
// answers there. Each word that the device writes there bears the low half of the ticket, so that the host can tell for
// each word whether it has arrived. A fence instead would cost a round trip over the bus in every layer.
//
// `launch_params` is device memory that the host writes before each graph: its first word is the graph's number, which
// is the ticket of all of its look-ups. No argument changes from graph to graph, so that a captured graph can be
// launched again.
//
// `saved` gets a copy of `n_tokens` rows of `n_hidden` floats for the kernel that predicts (predict.cu), which runs
// when the engine may have given the memory of these rows to later nodes; with 0 tokens nothing is copied. Once a
// look-up has given up waiting, `gave_up` holds its ticket, and later look-ups of the graph do not wait.

typedef unsigned int u32;
typedef unsigned long long u64;

// Words of a mailbox.
#define ANSWERED 0 // the ticket, written last by the host
#define GO 1       // the host's answer: 1, or 0 when the experts will not come
#define LATE 2     // the ticket, when no answer came in time
#define MISSING 3  // in the low half: how many rows have an expert in no slot, or an id out of range
#define ROWS 8     // in the low half of each word: the expert of a row

#define OUT_OF_RANGE 0xffffu

// What one read of the mailbox counts towards spin_limit. On the fake driver a read lets other threads run, perhaps
// many.
#ifndef ONE_LOOK
#define ONE_LOOK 1
#endif

#define VECTOR 16
#define UNROLL 4

// Copies a row with all threads of the block. Several loads are in flight before the first store.
static __device__ void copy_row(char * to, const char * from, u32 n_bytes) {
    u32 thread = threadIdx.x, threads = blockDim.x;
    if (((u64) to | (u64) from | n_bytes) % VECTOR != 0) {
        for (u32 i = thread; i < n_bytes / 4; i += threads) {
            ((u32 *) to)[i] = ((const u32 *) from)[i];
        }
        return;
    }
    u32 n = n_bytes / VECTOR;
    for (u32 first = thread; first < n; first += UNROLL * threads) {
        uint4 loaded[UNROLL];
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) {
            if (first + i * threads < n) {
                loaded[i] = ((const uint4 *) from)[first + i * threads];
            }
        }
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) {
            if (first + i * threads < n) {
                ((uint4 *) to)[first + i * threads] = loaded[i];
            }
        }
    }
}

extern "C" __global__ void device_lookup(const char * ids, u64 column_bytes, u64 row_bytes, u32 n_used, u32 n_rows,
                                         const int * table, u32 n_experts, int * slots, u32 * mailbox_memory,
                                         const u32 * launch_params, u32 spin_limit, const char * hidden,
                                         u64 hidden_row_bytes, u32 n_hidden, u32 n_tokens, float * saved,
                                         u32 * gave_up) {
    __shared__ u32 missing;
    volatile u32 * mailbox = mailbox_memory;
    u32 row = threadIdx.x;
    if (row == 0) {
        missing = 0;
    }
    __syncthreads();

    u32 ticket = launch_params[0];
    u32 mark = ticket << 16;
    int expert = 0;
    int slot = 0;
    if (row < n_rows) {
        expert = *(const int *) (ids + (row / n_used) * row_bytes + (row % n_used) * column_bytes);
        if (expert < 0 || (u32) expert >= n_experts) {
            expert = -1;
        }
        slot = expert < 0 ? -1 : table[expert];
        mailbox[ROWS + row] = mark | (expert < 0 ? OUT_OF_RANGE : (u32) expert);
        if (slot < 0) {
            atomicAdd(&missing, 1u);
        }
    }
    for (u32 token = 0; token < n_tokens; token++) {
        copy_row((char *) (saved + token * n_hidden), hidden + token * hidden_row_bytes,
                 n_hidden * (u32) sizeof(float));
    }
    __syncthreads();

    u32 n_missing = missing;
    if (row == 0) {
        mailbox[MISSING] = mark | n_missing;
    }
    if (n_missing) {
        if (row == 0) {
            __threadfence_system();
            u32 waited = *(volatile u32 *) gave_up == ticket ? spin_limit : 0;
            while (mailbox[ANSWERED] != ticket && waited < spin_limit) {
                waited += ONE_LOOK;
            }
            if (mailbox[ANSWERED] != ticket) {
                mailbox[LATE] = ticket;
                *(volatile u32 *) gave_up = ticket;
            }
            __threadfence_system();
        }
        __syncthreads();
        if (row < n_rows && slot < 0 && expert >= 0) {
            slot = ((const volatile int *) table)[expert];
        }
    }
    if (row < n_rows) {
        slots[row] = slot < 0 ? 0 : slot; // a look-up that gave up computes a result that is not used
    }
}
