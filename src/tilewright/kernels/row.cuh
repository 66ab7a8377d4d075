// Rows of a matrix in 16-byte vectors, and reductions over lanes, block and cluster. NVRTC compiles what includes this:
// no other header is needed.
//
//   ALIGNED, PEELED, SHIFTED   how rows lie in memory, a constant of the build:
//       ALIGNED  every row starts on LINE bytes and is a whole number of vectors;
//       PEELED   rows of all tensors are alike modulo 16 bytes. Vectors are counted from a multiple of LINE bytes,
//                `head` lanes before the first column; lanes outside of the row are read and masked, never written;
//       SHIFTED  as PEELED, but for tensors that are only read: two of their vectors are loaded and shifted. The row that
//                is made first, from which the others take their vectors, must be one that is written.
//   LINE      16 unless defined, or 128: the vectors of a warp lie in whole cache lines.
//   State     what is reduced: a struct of 4-byte words; identity() and combine(State), associative and commutative.
#pragma once

// A kernel of blocks of so many threads, BLOCKS of which a multiprocessor must hold; CLUSTER of them are a cluster.
#if CLUSTER > 1
#define ROW_KERNEL(threads) extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(threads, BLOCKS)
#else
#define ROW_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, BLOCKS)
#endif

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -3.402823466e38f;  // finite, so that -inf minus it is no NaN
#ifndef LINE
#define LINE 16
#endif
constexpr int ALIGNED = 0, PEELED = 1, SHIFTED = 2;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// 2^x, off by at most two units of the last place; 0 where the result is below normal.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct bf16 {
    unsigned short bits;
};
struct fp16 {
    unsigned short bits;
};

template <class T>
constexpr int lanes = 16 / sizeof(T);

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ __forceinline__ float widen(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// One element, rounded to nearest even.
__device__ __forceinline__ void narrow(float &place, float x) { place = x; }
__device__ __forceinline__ void narrow(bf16 &place, float x) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(place.bits) : "f"(x));
}
__device__ __forceinline__ void narrow(fp16 &place, float x) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(place.bits) : "f"(x));
}

// Two elements of 16 bits from one word, the lower first.
__device__ __forceinline__ void widen_pair(unsigned word, float &low, float &high, bf16) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void widen_pair(unsigned word, float &low, float &high, fp16) {
    low = widen(fp16{(unsigned short)(word & 0xffffu)});
    high = widen(fp16{(unsigned short)(word >> 16)});
}
__device__ __forceinline__ unsigned narrow_pair(float low, float high, bf16) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ unsigned narrow_pair(float low, float high, fp16) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

template <class T>
__device__ __forceinline__ void unpack(uint4 vector, float (&x)[lanes<T>]) {
    if constexpr (sizeof(T) == 4) {
        x[0] = __uint_as_float(vector.x), x[1] = __uint_as_float(vector.y);
        x[2] = __uint_as_float(vector.z), x[3] = __uint_as_float(vector.w);
    } else {
        widen_pair(vector.x, x[0], x[1], T()), widen_pair(vector.y, x[2], x[3], T());
        widen_pair(vector.z, x[4], x[5], T()), widen_pair(vector.w, x[6], x[7], T());
    }
}

template <class T>
__device__ __forceinline__ uint4 pack(const float (&x)[lanes<T>]) {
    if constexpr (sizeof(T) == 4) {
        return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
    } else {
        return {narrow_pair(x[0], x[1], T()), narrow_pair(x[2], x[3], T()), narrow_pair(x[4], x[5], T()),
                narrow_pair(x[6], x[7], T())};
    }
}

// The greatest element of the vectors given to update(); NaN are passed over. 16-bit elements are compared in pairs.
template <class T>
struct ElementMax {
    float value = LOWEST;
    __device__ __forceinline__ void update(uint4 v) {
        if constexpr (sizeof(T) == 4) {
            float x[4];
            unpack<T>(v, x);
            value = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), value);
        } else {
            float low, high;
            widen_pair(max_pair(max_pair(v.x, v.y, T()), max_pair(v.z, v.w, T()), T()), low, high, T());
            value = fmaxf(fmaxf(low, high), value);
        }
    }
    static __device__ __forceinline__ unsigned max_pair(unsigned a, unsigned b, bf16) {
        asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
        return a;
    }
    static __device__ __forceinline__ unsigned max_pair(unsigned a, unsigned b, fp16) {
        asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
        return a;
    }
};

// Stops the compiler from keeping unpacked copies live; they cost registers that the loads need.
template <int N>
__device__ __forceinline__ void drop_unpacked(uint4 (&vectors)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+r"(vectors[i].x), "+r"(vectors[i].y), "+r"(vectors[i].z), "+r"(vectors[i].w));
}

// Lane `lane` of a vector, which must be a constant after unrolling.
template <class T>
__device__ __forceinline__ T element(uint4 vector, int lane) {
    const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
    if constexpr (sizeof(T) == 4)
        return __uint_as_float(words[lane]);
    else
        return T{(unsigned short)(words[lane / 2] >> (lane % 2 * 16))};
}

// Plain: cache hints (no_allocate, prefetch, .cs) cost 8 % on an H200 (docs/experiments.md).
__device__ __forceinline__ uint4 load_vector(const void *address) {
    uint4 v;
    asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(address));
    return v;
}
// For data that a kernel reads once while it writes as much: L2 keeps lines read longer than lines written. It gains
// 0.02 to 0.05 of a copy's bandwidth on an H200; data that stays in L2 loses 6 % (docs/experiments.md).
__device__ __forceinline__ unsigned long long evict_last_policy() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ uint4 load_vector_once(const void *address) {
    uint4 v;
    asm("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(address), "l"(evict_last_policy()));
    return v;
}
// 16 bytes from any address that is a multiple of their elements' size.
__device__ __forceinline__ uint4 load_shifted(const void *address) {
    const unsigned shift = (unsigned long long)address % 16;
    const char *start = (const char *)address - shift;
    // Without a shift the next vector may lie outside of the tensor.
    const uint4 a = load_vector(start), b = load_vector(start + (shift ? 16 : 0));
    unsigned words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 6; i++) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; i++) words[i] = shift & 4 ? words[i + 1] : words[i];
    const unsigned bits = 8 * (shift & 3);
    return {__funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits),
            __funnelshift_r(words[2], words[3], bits), __funnelshift_r(words[3], words[4], bits)};
}
__device__ __forceinline__ void store_vector(void *address, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

template <class T, int Alignment>
struct Row {
    static constexpr int Lanes = lanes<T>;
    T *base;      // lane 0 of vector 0
    int head;     // lanes before column 0
    int columns;
    int vectors;  // one past the last that has lanes of the row

    // `start` points at column 0.
    __device__ __forceinline__ Row(const T *start, int columns_)
        : Row(start, columns_, Alignment == ALIGNED ? 0 : int((unsigned long long)start % LINE / sizeof(T))) {}
    // With the vectors of `other`, which lies alike modulo 16 bytes; to be read alone if SHIFTED.
    __device__ __forceinline__ Row(const T *start, const Row &other) : Row(start, other.columns, other.head) {}
    __device__ __forceinline__ Row(const T *start, int columns_, int head_)
        : base(const_cast<T *>(start) - head_), head(head_), columns(columns_) {
        vectors = columns == 0 ? 0 : (columns + head + (Alignment == ALIGNED ? 0 : Lanes - 1)) / Lanes;
    }
    // The most vectors of any row with so many columns.
    static __device__ __forceinline__ int most_vectors(int columns) {
        return (columns + (Alignment == ALIGNED ? 0 : LINE / int(sizeof(T)) - 1) + Lanes - 1) / Lanes;
    }
    __device__ __forceinline__ int column(int vector) const { return vector * Lanes - head; }
    __device__ __forceinline__ bool holds(int vector) const {
        return vector < vectors && (Alignment == ALIGNED || vector >= head / Lanes);
    }
    __device__ __forceinline__ bool is_partial(int vector) const {
        return Alignment != ALIGNED && (column(vector) < 0 || column(vector) + Lanes > columns);
    }
    // Lanes outside of a peeled row are read too: an aligned 16-byte piece of memory is readable if one byte of it is.
    __device__ __forceinline__ uint4 load(int vector) const {
        const T *address = base + (long long)vector * Lanes;
        if constexpr (Alignment != SHIFTED) return load_vector(address);
        if (!is_partial(vector)) return load_shifted(address);
        float x[Lanes];
#pragma unroll
        for (int i = 0; i < Lanes; i++) x[i] = unsigned(column(vector) + i) < unsigned(columns) ? widen(address[i]) : 0.f;
        return pack<T>(x);
    }
    // load() for data that a kernel reads once while it writes as much.
    __device__ __forceinline__ uint4 load_once(int vector) const {
        return Alignment == SHIFTED ? load(vector) : load_vector_once(base + (long long)vector * Lanes);
    }
    // The vector with the lanes outside of the row set to `fill`.
    __device__ __forceinline__ uint4 masked(int vector, uint4 loaded, float fill) const {
        if (!is_partial(vector)) return loaded;
        float x[Lanes];
        unpack<T>(loaded, x);
#pragma unroll
        for (int i = 0; i < Lanes; i++)
            if (unsigned(column(vector) + i) >= unsigned(columns)) x[i] = fill;
        return pack<T>(x);
    }
    static __device__ __forceinline__ uint4 filled(float fill) {
        float x[Lanes];
#pragma unroll
        for (int i = 0; i < Lanes; i++) x[i] = fill;
        return pack<T>(x);
    }
    __device__ __forceinline__ void store(int vector, uint4 packed) const {
        T *address = base + (long long)vector * Lanes;
        if (!is_partial(vector)) {
            store_vector(address, packed);
        } else if constexpr (Alignment != ALIGNED) {
#pragma unroll
            for (int i = 0; i < Lanes; i++)
                if (unsigned(column(vector) + i) < unsigned(columns)) address[i] = element<T>(packed, i);
        }
    }
};

struct Sum {
    float sum;
    static __device__ __forceinline__ Sum identity() { return {0.f}; }
    __device__ __forceinline__ void combine(Sum other) { sum += other.sum; }
};

// max x and sum exp(x - max) of the elements seen so far: M. Milakov, N. Gimelshein, "Online normalizer
// calculation for softmax", 2018.
struct MaxSum {
    float max, sum;
    static __device__ __forceinline__ MaxSum identity() { return {LOWEST, 0.f}; }
    __device__ __forceinline__ void combine(MaxSum other) {
        const float most = fmaxf(max, other.max);
        sum = sum * exp2_approx((max - most) * LOG2E) + other.sum * exp2_approx((other.max - most) * LOG2E);
        max = most;
    }
};

template <class State>
__device__ __forceinline__ State shuffle_xor(State state, int distance) {
    State other;
    const unsigned *words = reinterpret_cast<const unsigned *>(&state);
    unsigned *received = reinterpret_cast<unsigned *>(&other);
#pragma unroll
    for (int i = 0; i < sizeof(State) / 4; i++) received[i] = __shfl_xor_sync(~0u, words[i], distance);
    return other;
}

template <int Width, class State>
__device__ __forceinline__ State reduce_lanes(State state) {
#pragma unroll
    for (int distance = Width / 2; distance > 0; distance /= 2) state.combine(shuffle_xor(state, distance));
    return state;
}

// Every warp combines `Count` states in shared memory.
template <int Count, class State>
__device__ __forceinline__ State reduce_slots(const State *slots) {
    constexpr int Width = Count < 32 ? Count : 32;
    State state = slots[threadIdx.x % Width];
#pragma unroll
    for (int i = 32; i < Count; i += 32) state.combine(slots[i + threadIdx.x % 32]);
    return reduce_lanes<Width>(state);
}

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// An mbarrier in shared memory. Phase 0, 1, 2, ... completes once `arrivals` threads have called arrive() or expect()
// and the expected bytes have arrived.
struct Barrier {
    unsigned long long state;
    __device__ __forceinline__ unsigned address() const { return unsigned(__cvta_generic_to_shared(&state)); }
    // By one thread, before all threads synchronise.
    __device__ __forceinline__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
    }
    __device__ __forceinline__ void expect(unsigned bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
    }
    __device__ __forceinline__ void wait(unsigned phase) const {
        asm volatile(
            "{\n.reg .pred done;\n"
            "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again;\n}"
            ::"r"(address()), "r"(phase & 1) : "memory");
    }
    // For arrivals of this block's threads and bulk copies only: without cluster scope, L1 is not invalidated.
    __device__ __forceinline__ void wait_block(unsigned phase) const {
        asm volatile(
            "{\n.reg .pred done;\n"
            "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again;\n}"
            ::"r"(address()), "r"(phase & 1) : "memory");
    }
};

// Stores `state` to the same slot in the shared memory of block `rank` of the cluster; `barrier` there counts its
// bytes.
template <class State>
__device__ __forceinline__ void send(State *slot, State state, const Barrier &barrier, int rank) {
    const unsigned *words = reinterpret_cast<const unsigned *>(&state);
    unsigned place, counter;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(place) : "r"(unsigned(__cvta_generic_to_shared(slot))), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(barrier.address()), "r"(rank));
#pragma unroll
    for (int i = 0; i < sizeof(State) / 4; i++)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                     ::"r"(place + 4 * i), "r"(words[i]), "r"(counter) : "memory");
}

// Combines the states of all threads of a block or cluster; every thread gets the result. Two sets of slots alternate:
// a block is at most one reduction ahead of another, since it needs the other's last state.
//
// Blocks send through st.async, whose bytes the receiver's mbarrier counts: the release of a cluster barrier would wait
// for all stores to global memory.
template <int Threads, int Cluster, class State>
struct RowReduce {
    static constexpr int warps = Threads / 32;
    State slots[2][Cluster * warps];
    Barrier barriers[2];

    // At the start of the kernel, by all threads. ready() waits until all blocks of the cluster run; call it before the
    // first reduction.
    __device__ __forceinline__ void start() {
        if constexpr (Cluster > 1) {
            if (threadIdx.x == 0) barriers[0].init(1), barriers[1].init(1);
            __syncthreads();
            asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        }
    }
    __device__ __forceinline__ void ready() const {
        if constexpr (Cluster > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
    // `number` counts the reductions: 0, 1, 2, ...
    __device__ __forceinline__ State operator()(State state, unsigned number) {
        State *here = slots[number % 2];
        state = reduce_lanes<32>(state);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if constexpr (Cluster == 1) {
            if constexpr (warps == 1) return state;
            if (lane == 0) here[warp] = state;
            __syncthreads();
        } else {
            Barrier &barrier = barriers[number % 2];
            if (threadIdx.x == 0) barrier.expect(sizeof(slots[0]));
            if (lane < Cluster) send(here + cluster_rank() * warps + warp, state, barrier, lane);
            barrier.wait(number / 2);
        }
        return reduce_slots<Cluster * warps>(here);
    }
};
