// Predicts which experts a later layer will use, by applying its router to the hidden state of an earlier layer. The
// predicted experts that are in no slot are posted to the host, which may fetch them meanwhile. hiprtc and nvrtc both
// compile this file; it includes nothing, and nothing in it depends on the wave size.
//
// There is a block for each expert. The block that ends last ranks all scores. The candidates are the experts that may
// be evicted from the layer. For each expert to be fetched, this block removes the next candidate from the layer's
// table. The layer's look-up, which runs later on this stream, then no longer leads to the candidate's slot, so the
// host may fill that slot at once.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define MOST_EXPERTS 512
#define MOST_SCORES 4096 // of all tokens
#define MOST_ROWS 64     // tokens times experts of each token
#define MOST_THREADS 256
#define MOST_CANDIDATES 8

// Types of the router's matrix, as ggml numbers them.
#define TYPE_F32 0
#define TYPE_F16 1
#define TYPE_BF16 30

// Words of a layer's launch parameters, which the host writes before each graph.
#define N_CANDIDATES 0
#define CANDIDATES 1 // experts; -1: an empty slot

// Words of a mailbox.
#define POSTED 0 // the ticket, written last
#define N_CHOSEN 1
#define CHOSEN 2     // an expert to be fetched, and the index of the candidate that it replaces; up to 4 of these
#define PREDICTED 16 // every row's predicted expert, the likeliest of all tokens first

static __device__ float of_bits(u32 bits) {
    union {
        u32 bits;
        float value;
    } either;
    either.bits = bits;
    return either.value;
}

static __device__ float of_half(u16 half) {
    u32 sign = (u32) (half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
    if (exponent == 0) {
        return (sign ? -1.0f : 1.0f) * (float) fraction * (1.0f / 16777216.0f);
    }
    if (exponent == 31) {
        exponent = 255 - 112;
    }
    return of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

template <u32 TYPE> static __device__ float weight(const char * row, u32 i) {
    if (TYPE == TYPE_F32) {
        return ((const float *) row)[i];
    }
    u16 bits = ((const u16 *) row)[i];
    return TYPE == TYPE_BF16 ? of_bits((u32) bits << 16) : of_half(bits);
}

struct Sums {
    float product, square;
};

// A thread's part of the product of a state with a row of the router, and of the state's square. Several loads are in
// flight at once.
template <u32 TYPE>
static __device__ Sums sums_of(const float * state, const float * norm, const char * row, u32 n_hidden) {
    Sums sums = { 0, 0 };
#pragma unroll 4
    for (u32 i = threadIdx.x; i < n_hidden; i += blockDim.x) {
        float value = state[i];
        sums.square += value * value;
        sums.product += (norm ? value * norm[i] : value) * weight<TYPE>(row, i);
    }
    return sums;
}

extern "C" __global__ void predict(const float * hidden, u32 n_hidden, u32 n_tokens, const char * router,
                                   u64 router_row_bytes, u32 router_type, const float * norm, float epsilon,
                                   const float * bias, u32 is_sigmoid, const float * late_bias, u32 n_used,
                                   u32 n_spared, const u32 * ticket, const u32 * launch_params, u32 most,
                                   float * scores, u32 * n_done, int * table, u32 * mailbox_memory) {
    __shared__ float products[MOST_THREADS];
    __shared__ float squares[MOST_THREADS];
    __shared__ u32 is_last;
    u32 thread = threadIdx.x, n_threads = blockDim.x, n_experts = gridDim.x, mine = blockIdx.x;

    const char * row = router + mine * router_row_bytes;
    for (u32 token = 0; token < n_tokens; token++) {
        const float * state = hidden + token * n_hidden;
        Sums sums = router_type == TYPE_F32   ? sums_of<TYPE_F32>(state, norm, row, n_hidden)
                    : router_type == TYPE_F16 ? sums_of<TYPE_F16>(state, norm, row, n_hidden)
                                              : sums_of<TYPE_BF16>(state, norm, row, n_hidden);
        products[thread] = sums.product;
        squares[thread] = sums.square;
        for (u32 half = n_threads / 2; half > 0; half /= 2) {
            __syncthreads();
            if (thread < half) {
                products[thread] += products[thread + half];
                squares[thread] += squares[thread + half];
            }
        }
        if (thread == 0) {
            float score = products[0];
            if (norm) {
                score /= sqrtf(squares[0] / (float) n_hidden + epsilon);
            }
            if (bias) {
                score += bias[mine];
            }
            if (is_sigmoid) {
                score = 1.0f / (1.0f + expf(-score));
            }
            if (late_bias) {
                score += late_bias[mine];
            }
            scores[token * n_experts + mine] = score;
        }
        __syncthreads();
    }
    if (thread == 0) {
        __threadfence();
        is_last = atomicAdd(n_done, 1u) == n_experts - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) {
        return;
    }

    // Little shared memory is used: an SM that has to divide its cache anew for this kernel delays the engine's
    // kernels.
    __shared__ float of_token[MOST_EXPERTS];
    __shared__ int order[MOST_ROWS];
    __shared__ unsigned char is_there[MOST_EXPERTS];
    __shared__ unsigned char is_spared[MOST_EXPERTS];
    __shared__ int candidates[MOST_CANDIDATES];
    u32 n_candidates = launch_params[N_CANDIDATES];
    if (thread < n_candidates && thread < MOST_CANDIDATES) {
        candidates[thread] = (int) launch_params[CANDIDATES + thread];
    }
    u32 n_rows = n_tokens * n_used;
    volatile float * of_all_blocks = scores;
    for (u32 i = thread; i < n_rows; i += n_threads) {
        order[i] = -1;
    }
    for (u32 i = thread; i < n_experts; i += n_threads) {
        is_there[i] = table[i] >= 0;
        is_spared[i] = 0;
    }
    for (u32 token = 0; token < n_tokens; token++) {
        __syncthreads();
        for (u32 i = thread; i < n_experts; i += n_threads) {
            of_token[i] = of_all_blocks[token * n_experts + i];
        }
        __syncthreads();
        for (u32 expert = thread; expert < n_experts; expert += n_threads) {
            u32 rank = 0;
            float score = of_token[expert];
            for (u32 other = 0; other < n_experts; other++) {
                rank += of_token[other] > score || (of_token[other] == score && other < expert);
            }
            if (rank < n_used) {
                order[rank * n_tokens + token] = (int) expert;
            }
            if (rank < n_used + n_spared) {
                is_spared[expert] = 1;
            }
        }
    }
    __syncthreads();

    volatile u32 * mailbox = mailbox_memory;
    for (u32 i = thread; i < n_rows; i += n_threads) {
        mailbox[PREDICTED + i] = (u32) order[i];
    }
    if (thread == 0) {
        u32 n = 0, candidate = 0;
        for (u32 i = 0; i < n_rows && n < most; i++) {
            int expert = order[i];
            if (expert < 0 || is_there[expert]) {
                continue;
            }
            while (candidate < n_candidates && candidates[candidate] >= 0 && is_spared[candidates[candidate]]) {
                candidate++;
            }
            if (candidate == n_candidates) {
                break;
            }
            int leaves = candidates[candidate];
            if (leaves >= 0) {
                table[leaves] = -1;
            }
            is_there[expert] = 1;
            mailbox[CHOSEN + 2 * n] = (u32) expert;
            mailbox[CHOSEN + 2 * n + 1] = candidate;
            candidate++;
            n++;
        }
        mailbox[N_CHOSEN] = n;
        *n_done = 0;
    }
    __threadfence_system();
    __syncthreads();
    if (thread == 0) {
        mailbox[POSTED] = *ticket;
    }
}
