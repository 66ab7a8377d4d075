// Numbers of the element types: 16-byte vectors of them to fp32 and back. ELEMENT and WEIGHT as in stream.cuh.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int SIZE = ELEMENT == 0 ? 4 : 2;
constexpr int VEC = 16 / SIZE;
constexpr int WEIGHT_SIZE = WEIGHT == 0 ? 4 : 2;

template <int KIND> __device__ void unpack(u32 word, float& low, float& high) {
    if (KIND == 1) {
        low = __uint_as_float(word << 16);
        high = __uint_as_float(word & 0xffff0000u);
    } else {
        asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
            : "=f"(low), "=f"(high) : "r"(word));
    }
}

template <int KIND> __device__ u32 pack(float low, float high) {
    u32 word;
    if (KIND == 1) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// COUNT numbers of a kind at an address aligned to all of them or to 16 bytes, as fp32.
template <int KIND, int COUNT> __device__ void read(const char* at, float* to) {
    constexpr int WORDS = COUNT * (KIND == 0 ? 4 : 2) / 4;
    u32 words[WORDS];
    if constexpr (WORDS == 2) {
        *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(at);
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4)
            *reinterpret_cast<uint4*>(words + i) = *reinterpret_cast<const uint4*>(at + 4 * i);
    }
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        if constexpr (KIND == 0) to[i] = __uint_as_float(words[i]);
        else unpack<KIND>(words[i], to[2 * i], to[2 * i + 1]);
    }
}

template <int KIND> __device__ float read_one(const void* base, i64 index) {
    if (KIND == 0) return static_cast<const float*>(base)[index];
    float low, high;
    unpack<KIND>(static_cast<const unsigned short*>(base)[index], low, high);
    return low;
}

template <int KIND> __device__ void write_one(char* at, float value) {
    if (KIND == 0) *reinterpret_cast<float*>(at) = value;
    else *reinterpret_cast<unsigned short*>(at) = pack<KIND>(value, 0.f) & 0xffffu;
}

__device__ uint4 packed(const float* from) {
    if constexpr (ELEMENT == 0)
        return make_uint4(__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
                          __float_as_uint(from[3]));
    else
        return make_uint4(pack<ELEMENT>(from[0], from[1]), pack<ELEMENT>(from[2], from[3]),
                          pack<ELEMENT>(from[4], from[5]), pack<ELEMENT>(from[6], from[7]));
}

// To the element type and back.
__device__ void round_vector(float* values) {
    if constexpr (ELEMENT != 0) {
#pragma unroll
        for (int e = 0; e < VEC; e += 2)
            unpack<ELEMENT>(pack<ELEMENT>(values[e], values[e + 1]), values[e], values[e + 1]);
    }
}
