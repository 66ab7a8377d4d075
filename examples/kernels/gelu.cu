// GELU (erf) in CUDA C++: the arithmetic of formulas.py, one 16-byte vector a thread.
//
// ELEMENT   bf16, fp16 or float
// VECTOR_ALIGNED   1: all tensors start on 16 bytes; 0: element by element
// BACKWARD  1: the gradient; 0: the value
// THREADS   of a block
//
// Limit: memory, as in Triton: where memory is the limit, the language does not matter.
#include "row.cuh"

constexpr bool PRECISE = sizeof(ELEMENT) == 4;
constexpr float DENSITY = 0.3989422804014327f;  // 1/sqrt(2 pi)

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct Normal {
    float phi, gauss;  // the distribution at x, and exp(-x*x/2)
};

__device__ __forceinline__ Normal normal(float x) {
    constexpr float brief[] = {-0.09098558280449495f, 0.2010439969601445f, 0.08297358984371417f, 0.15792019100461738f,
                               0.14904112091170063f};
    constexpr float full[] = {-0.07203386108021945f, 0.2854528429735708f,  -0.3341885419282241f,
                              0.35403240737962605f,  -0.09724486793324155f, 0.12635479246627246f,
                              0.06879013100622178f,  0.08512939523011517f,  0.08370770368776144f};
    const float t = reciprocal(fmaf(fabsf(x), PRECISE ? 0.21f : 0.375f, 1.0f));
    float p = PRECISE ? full[0] : brief[0];
#pragma unroll
    for (int k = 1; k < (PRECISE ? 9 : 5); ++k) p = fmaf(p, t, PRECISE ? full[k] : brief[k]);
    const float gauss = exp2_approx(x * x * (-0.5f * LOG2E));
    const float h = p * t * gauss;
    return {x >= 0.0f ? 1.0f - h : h, gauss};
}

__device__ __forceinline__ float value(float x) { return x * normal(x).phi; }

__device__ __forceinline__ float slope(float x) {
    const Normal at = normal(x);
    return fmaf(x * DENSITY, at.gauss, at.phi);
}

// Of the `size` elements at `x` and, where there is one, of the gradient at `dy`.
template <int Size>
__device__ __forceinline__ void apply(const float (&x)[Size], const float (&dy)[Size], float (&out)[Size]) {
#pragma unroll
    for (int lane = 0; lane < Size; ++lane) out[lane] = BACKWARD ? dy[lane] * slope(x[lane]) : value(x[lane]);
}

__device__ __forceinline__ void one(const ELEMENT* x, const ELEMENT* dy, ELEMENT* out, long long i) {
    const float x_[1] = {widen(x[i])}, dy_[1] = {BACKWARD ? widen(dy[i]) : 0.0f};
    float out_[1];
    apply(x_, dy_, out_);
    narrow(out[i], out_[0]);
}

// out = gelu(x), or dy * gelu'(x) where BACKWARD. A thread has vector `i` of its block's; the elements that
// fill no vector, all of them where the tensors are not aligned, are the first threads'.
extern "C" __global__ void __launch_bounds__(THREADS)
    gelu(const ELEMENT* x, const ELEMENT* dy, ELEMENT* out, long long n) {
    constexpr int LANES = lanes<ELEMENT>;
    const long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
    const long long vectors = VECTOR_ALIGNED ? n / LANES : 0;
    if (i < vectors) {
        float x_[LANES], dy_[LANES] = {}, out_[LANES];
        unpack<ELEMENT>(load_vector(x + i * LANES), x_);
        if (BACKWARD) unpack<ELEMENT>(load_vector(dy + i * LANES), dy_);
        apply(x_, dy_, out_);
        store_vector(out + i * LANES, pack<ELEMENT>(out_));
    }
    if (vectors * LANES + i < n) one(x, dy, out, vectors * LANES + i);
}
