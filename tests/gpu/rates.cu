// Rates of a GPU measured anew: what the ceilings of `tilewright.hardware` are held against.

// A block walks `vectors` (a multiple of 4096) of 16 bytes of its own, `walks` times, past the multiprocessor's own
// cache, and reads, writes or copies them, as READS and WRITES say.
extern "C" __global__ void __launch_bounds__(1024)
    walk(const uint4* source, uint4* target, long long vectors, int walks) {
    const uint4* from = source + blockIdx.x * vectors + threadIdx.x;
    uint4* to = target + blockIdx.x * vectors + threadIdx.x;
    unsigned seen = 0;
    for (int turn = 0; turn < walks; ++turn) {
        for (long long start = 0; start < vectors; start += 4096) {
            uint4 held[4];
            for (int i = 0; i < 4; ++i) {
                held[i] = READS ? __ldcg(from + start + i * 1024) : make_uint4(turn, turn, turn, turn);
            }
            for (int i = 0; i < 4; ++i) {
                if (WRITES) {
                    to[start + i * 1024] = held[i];
                } else {
                    seen ^= held[i].x ^ held[i].y ^ held[i].z ^ held[i].w;
                }
            }
        }
    }
    if (!WRITES) to[0].x = seen;
}

// Six chains of multiply-adds a thread, x and term - x by turns, 64 steps of each in a turn.
extern "C" __global__ void __launch_bounds__(256) multiply_add(float* out, float factor, float term, int turns) {
    float x[6];
    for (int i = 0; i < 6; ++i) x[i] = threadIdx.x + 0.1f * i;
    for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
        for (int step = 0; step < 64; ++step) {
            for (int i = 0; i < 6; ++i) x[i] = __fmaf_rn(x[i], factor, term);
        }
    }
    float sum = 0;
    for (int i = 0; i < 6; ++i) sum += x[i];
    out[blockIdx.x * 256 + threadIdx.x] = sum;
}
