// The gate of one layer: turns the router's expert ids into slot ids by the residency table, and holds its stream while
// experts are missing, until the host has answered. hiprtc and nvrtc both compile this file; it includes nothing.
//
// One block of at least `n_rows` threads (64 rows at most). `door` is host memory: the host polls it and answers there.
// `kept` gets a copy of `n_tokens` rows of `n_hidden` floats for the kernel that predicts (predict.cu), which runs while
// the engine gives their memory to others; 0 tokens: it gets none.

typedef unsigned int u32;
typedef unsigned long long u64;

// Words of a door.
#define ARRIVED 0   // the ticket, written last by the device
#define ANSWERED 1  // the ticket, written last by the host
#define GO 2        // the host's answer: 1, or 0 when the experts will not come
#define MISSING 3   // rows whose expert is in no slot, or an id out of range
#define LATE 4      // the ticket, when no answer came in time
#define ROWS 8      // the expert of each row

extern "C" __global__ void gate(const char* ids, u64 column_bytes, u64 row_bytes, u32 n_used, u32 n_rows,
                                const int* table, u32 n_experts, int* slots, u32* door_memory, u32 ticket,
                                u32 patience, const char* hidden, u64 hidden_row_bytes, u32 n_hidden,
                                u32 n_tokens, float* kept) {
    __shared__ u32 missing;
    volatile u32* door = door_memory;
    u32 row = threadIdx.x;
    if (row == 0) missing = 0;
    __syncthreads();

    int expert = 0;
    int slot = 0;
    if (row < n_rows) {
        expert = *(const int*)(ids + (row / n_used) * row_bytes + (row % n_used) * column_bytes);
        slot = expert >= 0 && (u32)expert < n_experts ? table[expert] : -1;
        door[ROWS + row] = (u32)expert;
        if (slot < 0) atomicAdd(&missing, 1u);
    }
    for (u32 token = 0; token < n_tokens; token++) {
        const float* from = (const float*)(hidden + token * hidden_row_bytes);
        for (u32 i = threadIdx.x; i < n_hidden; i += blockDim.x) kept[token * n_hidden + i] = from[i];
    }
    __threadfence_system();
    __syncthreads();

    if (row == 0) {
        door[MISSING] = missing;
        __threadfence_system();
        door[ARRIVED] = ticket;
        __threadfence_system();
        if (missing) {
            u32 waited = 0;
            while (door[ANSWERED] != ticket && waited < patience) waited++;
            if (door[ANSWERED] != ticket) door[LATE] = ticket;
            __threadfence_system();
        }
    }
    __syncthreads();

    if (row < n_rows) {
        if (slot < 0 && expert >= 0 && (u32)expert < n_experts) slot = ((const volatile int*)table)[expert];
        slots[row] = slot < 0 ? 0 : slot;  // whoever was not let through computes something that nobody reads
    }
}
