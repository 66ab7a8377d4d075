// The kernels before and after the products of attention's backward on Hopper. Both are bound by memory.
//
// attention_prepare   Δ = rowsum(dO ∘ O), lse times log2 e; zeroes the work counters and the fp32 sums of dQ of the
//                     first heads_zeroed heads
// attention_finish    dQ = scale · sums, rounded, from the order of registers to rows, where no dQ warps did so
//
// A program takes one block of QUERIES queries of one head.
// Constants: HEAD (64, 128 or 256, padded), QUERIES, HALF (fp16, else bf16).

#include "instructions.cuh"

constexpr int THREADS = 256, GROUP_THREADS = 128;
constexpr int LANES = HEAD / 8;  // threads of a row, 16 bytes each
constexpr int DQ_BLOCK = QUERIES * HEAD;
constexpr int DQ_COLUMNS = HEAD >= 128 ? QUERIES : QUERIES / 2;
constexpr int COUNTERS = 4;  // followed by two of each head
constexpr float LOG2_E = 1.4426950408889634f;

struct RowStrides {
    u64 batch, head, position;  // in elements
};

__device__ __forceinline__ u64 offset(const RowStrides& strides, int batch, int head, int position) {
    return batch * strides.batch + head * strides.head + position * strides.position;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_prepare(const char* out, const char* dout, const float* lse, float* scaled_lse, float* delta, float4* dq,
                      u32* counters, u64 out_batch, u64 out_head, u64 out_position, u64 dout_batch, u64 dout_head,
                      u64 dout_position, int queries, int width, int heads_zeroed) {
    int block = blockIdx.x, head = blockIdx.y, batch = blockIdx.z, lane = threadIdx.x % LANES;
    u64 of_head = (u64)batch * gridDim.y + head;
    u32* of_heads = counters + COUNTERS;
    if (of_head + block == 0 && threadIdx.x < COUNTERS) counters[threadIdx.x] = 0;
    if (block == 0 && threadIdx.x < 2) of_heads[of_head + threadIdx.x * gridDim.y * gridDim.z] = 0;
    u64 padded = of_head * gridDim.x * QUERIES;
    float4* sums = dq + (of_head * gridDim.x + block) * (DQ_BLOCK / 4);
#pragma unroll 4
    for (int i = threadIdx.x; of_head < heads_zeroed && i < DQ_BLOCK / 4; i += THREADS)
        sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    RowStrides out_strides{out_batch, out_head, out_position}, dout_strides{dout_batch, dout_head, dout_position};
#pragma unroll 4
    for (int row = threadIdx.x / LANES; row < QUERIES; row += THREADS / LANES) {
        int query = block * QUERIES + row;
        float sum = 0.0f;
        if (query < queries && lane * 8 < width) {
            uint4 o = *(const uint4*)(out + 2 * (offset(out_strides, batch, head, query) + lane * 8));
            uint4 d = *(const uint4*)(dout + 2 * (offset(dout_strides, batch, head, query) + lane * 8));
            u32 a[4] = {o.x, o.y, o.z, o.w}, b[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2 x = unpack(a[i]), y = unpack(b[i]);
                sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
            }
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
        if (lane == 0) {
            float l = query < queries ? lse[of_head * queries + query] : -infinity();
            delta[padded + query] = sum;
            // A query that sees no key gets weights of zero.
            scaled_lse[padded + query] = l == -infinity() ? infinity() : l * LOG2_E;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_finish(const float4* sums, char* dq, u64 dq_batch, u64 dq_head, u64 dq_position, int queries, int width,
                     float scale) {
    constexpr int PITCH = HEAD + 8;  // avoids bank conflicts
    __shared__ __align__(16) unsigned short tile[QUERIES * PITCH];
    int block = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
    sums += (((u64)batch * gridDim.y + head) * gridDim.x + block) * (DQ_BLOCK / 4);
#pragma unroll 4
    for (int i = threadIdx.x; i < DQ_BLOCK / 4; i += THREADS) {
        // Four registers of a thread of the warpgroup: rows r and r + 8 of dQᵀ, of two neighbouring queries each.
        float4 x = sums[i];
        int thread = i % GROUP_THREADS, part = i / GROUP_THREADS / (DQ_COLUMNS / 8);
        int column = thread / 32 * 16 + thread % 32 / 4 + (HEAD >= 128 ? part * 64 : 0);
        int query = i / GROUP_THREADS % (DQ_COLUMNS / 8) * 8 + thread % 4 * 2 + (HEAD >= 128 ? 0 : part * DQ_COLUMNS);
        u32 upper = pack(x.x * scale, x.y * scale), lower = pack(x.z * scale, x.w * scale);
        unsigned short* at = tile + query * PITCH + column;
        at[0] = upper & 0xFFFF, at[PITCH] = upper >> 16;
        at[8] = lower & 0xFFFF, at[PITCH + 8] = lower >> 16;
    }
    __syncthreads();
    RowStrides strides{dq_batch, dq_head, dq_position};
    int lane = threadIdx.x % LANES;
#pragma unroll 4
    for (int row = threadIdx.x / LANES; row < QUERIES; row += THREADS / LANES) {
        int query = block * QUERIES + row;
        if (query < queries && lane * 8 < width)
            *(uint4*)(dq + 2 * (offset(strides, batch, head, query) + lane * 8)) =
                *(uint4*)(tile + row * PITCH + lane * 8);
    }
}
