// Layer norm and RMS norm, as streamed.cu, of rows that begin at any word: a thread has the same columns of every row,
// wherever these lie, and their weights in registers, so that programs take rows in turn.
//
// A warp is for itself until a row's sums: it has a part of each row, of nearly so many words as the others (`Part`).
// The 16-byte pieces in which the words lie come into one of ROWS slots, to their places between lines; lanes read and
// write single words there, at any shift without conflicts; then whole pieces leave, and the words at the part's sides
// one by one. Both ways a warp's pieces are whole lines. Elements of 16 bits are two a word: a program's rows all begin
// on the same half of one.
//
// x and x² are summed together; sums, second looks and slots as in streamed.cu with LAG 1.
//
// Weight and bias are of the rows' type. Defined by whoever compiles, beside what weights.cuh wants: THREADS (a block,
// all of one row: WIDTH too), CLUSTER, BLOCKS (1 a multiprocessor), WORDS (of a row, a thread: the last not in every
// thread), ROWS, LAG (1), CENTERED, HAS_WEIGHT, HAS_BIAS as in held.cu.
//
// Limit: DRAM; in 16 bits the instructions of so few warps. On an H200, of the bandwidth of a copy, in brackets
// streamed.cu: layer norm in fp32 0.95 (0.90) at 50257 columns and 0.96 (0.91) at 100003, RMS norm 0.95 (0.91) and 0.97
// (0.92); in bf16 layer norm 0.89 (0.77) at 65537, 0.91 (0.84) at 100003 and 0.94 (0.80) at 200001, RMS norm 0.93
// (0.88), 0.94 (0.88) and 0.95 (0.89). Shorter rows are shelved.cu's: 0.94 (there 0.97) at 25001 in fp32, 0.90 (0.95)
// at 50257 in bf16.
// Lost: bulk copies into the slots, as fast in fp32, in bf16 layer norm 0.86 at 65537 and 0.92 at 100003, RMS norm 0.93
// and 0.94 at 200001; out of them, too, 0.00 to 0.02 less. At 50257 in fp32 16 warps of 25 words a thread 0.94,
// clusters of three, 39 of which run at once, 0.93 to 0.94.
#include "mail.cuh"
#include "moments.cuh"

static_assert(sizeof(WEIGHT) == sizeof(ELEMENT) && EDGES == RAGGED && LAG == 1);
constexpr int WARPS = THREADS / 32;
constexpr int EACH = 4 / sizeof(ELEMENT);  // elements of a word
constexpr int PIECES = 8 * WORDS + 8;      // that a part may lie in, from a line's beginning
constexpr int STEPS = (PIECES + 31) / 32;  // of a warp through them, of which, but for the first, SURE are its own
constexpr int SURE = (WORDS - 2) / 4;
constexpr int AHEAD = ROWS - 1;            // rows fetched before the first is summed
constexpr int KINDS = HAS_WEIGHT + HAS_BIAS;

extern __shared__ __align__(128) uint4 slots[];

// What a warp has of every row of its program: `count` words, the first being `first` behind the word in which the row
// begins, `head` elements behind the word's beginning. 32 (WORDS - 1) <= count <= 32 WORDS.
struct Part {
    int first, count, head;
    bool low, high;  // whether the first word's low half, the last word's high half is another row's
    __device__ __forceinline__ Part(int columns, int head_) : head(head_) {
        const int words = (columns + head + EACH - 1) / EACH, parts = CLUSTER * WARPS;
        const int number = cluster_rank() * WARPS + int(threadIdx.x) / 32;
        first = int((long long)words * number / parts);
        count = int((long long)words * (number + 1) / parts) - first;
        low = number == 0 && head > 0;
        high = number == parts - 1 && (columns + head) % EACH > 0;
    }
    // Whether this lane's i-th word is the part's.
    __device__ __forceinline__ bool has(int i) const {
        return i < WORDS - 1 || int(threadIdx.x) % 32 + 32 * (WORDS - 1) < count;
    }
    __device__ __forceinline__ int column(int word) const { return (first + word) * EACH - head; }
};

// Where a part lies in one row: `shift` words behind a line's beginning.
struct Place {
    char *line;
    int shift;
    __device__ __forceinline__ Place(const ELEMENT *row, const Part &part) {
        const unsigned long long at = ((unsigned long long)row & ~3ull) + 4ll * part.first;
        line = (char *)(at & ~127ull), shift = int(at & 127) / 4;
    }
};

// The warp's slot of a turn, and there this lane's first word.
__device__ __forceinline__ uint4 *slot_of(int turn) {
    return slots + (turn % ROWS * WARPS + int(threadIdx.x) / 32) * PIECES;
}
__device__ __forceinline__ unsigned *words_of(int turn, const Place &at) {
    return reinterpret_cast<unsigned *>(slot_of(turn)) + at.shift + threadIdx.x % 32;
}

__device__ __forceinline__ void unpack_word(unsigned word, float (&x)[1]) { x[0] = __uint_as_float(word); }
template <class Narrow = ELEMENT>
__device__ __forceinline__ void unpack_word(unsigned word, float (&x)[2]) {
    widen_pair(word, x[0], x[1], Narrow());
}
__device__ __forceinline__ unsigned pack_word(const float (&x)[1]) { return __float_as_uint(x[0]); }
template <class Narrow = ELEMENT>
__device__ __forceinline__ unsigned pack_word(const float (&x)[2]) {
    return narrow_pair(x[0], x[1], Narrow());
}

__device__ __forceinline__ void fetch(uint4 *slot, const Place &from, const Part &part) {
    const int lane = threadIdx.x % 32, begin = from.shift / 4, end = (from.shift + part.count + 3) / 4;
    uint4 *to = slot + lane;
    const char *source = from.line + lane * 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int piece = 32 * step + lane;
        if ((step > 0 && step < SURE) || (piece >= begin && piece < end))
            copy_vector_once(to + 32 * step, source + 512 * step);
    }
}

// This thread's part of the mean and mean square; halves that are another row's become 0.
__device__ __forceinline__ Moments gather(unsigned *words, const Part &part, float share) {
    const int lane = threadIdx.x % 32, last = part.count - 1;
    if (part.low && lane == 0) words[0] &= 0xffff0000u;
    if (part.high && lane == last % 32) words[last - lane] &= 0xffffu;
    // Two, so that sums wait less for sums.
    Moments found[2] = {};
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        float x[EACH] = {};
        if (part.has(i)) unpack_word(words[32 * i], x);
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            Moments &sums = found[(i + k) % 2];
            // Divided before they are summed, large values do not overflow.
            if (CENTERED) sums.mean = fmaf(x[k], share, sums.mean);
            sums.square = fmaf(x[k], x[k], sums.square);
        }
    }
    found[0].join(found[1]);
    return {found[0].mean, found[0].square * share};
}

// The same of x - mean.
__device__ __forceinline__ Moments centre(const unsigned *words, const Part &part, int columns, float share,
                                          float mean) {
    Moments found = Moments::none();
    const int lane = threadIdx.x % 32;
    // Few rows come here; unrolled, it would take registers from all.
#pragma unroll 1
    for (int word = lane; word < part.count; word += 32) {
        float x[EACH];
        unpack_word(words[word - lane], x);
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const float off = unsigned(part.column(word) + k) < unsigned(columns) ? x[k] - mean : 0.f;
            found.mean = fmaf(off, share, found.mean), found.square = fmaf(off, off, found.square);
        }
    }
    return {found.mean, found.square * share};
}

// Weight, then bias, of the columns that this thread has.
struct Weights {
    unsigned packed[KINDS > 0 ? KINDS : 1][WORDS];
    __device__ __forceinline__ void hold(int kind, const WEIGHT *from, const Part &part, int columns) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            float w[EACH];
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                const int column = part.column(32 * i + threadIdx.x % 32) + k;
                w[k] = part.has(i) && unsigned(column) < unsigned(columns) ? widen(from[column]) : 0.f;
            }
            packed[kind][i] = pack_word(w);
        }
    }
    __device__ __forceinline__ void of(int kind, int i, float (&to)[EACH]) {
        // What the compiler unpacked for one row it shall unpack again for the next.
        asm volatile("" : "+r"(packed[kind][i]));
        unpack_word(packed[kind][i], to);
    }
};

// The result takes its words' place.
__device__ __forceinline__ void normalise_words(unsigned *words, const Part &part, Normal found, Weights &weights) {
    const float shift = -found.mean * found.rstd;
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        float a[EACH] = {}, b[EACH];
        if (part.has(i)) unpack_word(words[32 * i], a);
#pragma unroll
        for (int k = 0; k < EACH; k++)
            // One instruction instead of two: what it rounds is far below 16 bits.
            a[k] = CENTERED && EACH == 2 ? fmaf(a[k], found.rstd, shift)
                                         : (CENTERED ? a[k] - found.mean : a[k]) * found.rstd;
        if constexpr (HAS_WEIGHT) {
            weights.of(0, i, b);
#pragma unroll
            for (int k = 0; k < EACH; k++) a[k] *= b[k];
        }
        if constexpr (HAS_BIAS) {
            weights.of(1, i, b);
#pragma unroll
            for (int k = 0; k < EACH; k++) a[k] += b[k];
        }
        if (part.has(i)) words[32 * i] = pack_word(a);
    }
}

// From the slot to `out`, where the line begins from whose beginning the part lies `shift` words: whole pieces, the
// words at their sides, and the halves of words that a row begins and ends with.
__device__ __forceinline__ void send(char *out, const uint4 *slot, int shift, const Part &part) {
    const int lane = threadIdx.x % 32, begin = shift + part.low, end = shift + part.count - part.high;
    const int low = (begin + 3) / 4, high = end / 4;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int piece = 32 * step + lane;
        if ((step > 0 && step < SURE) || (piece >= low && piece < high)) store_vector(out + 16 * piece, slot[piece]);
    }
    const unsigned *words = reinterpret_cast<const unsigned *>(slot);
    const int side = lane < 4 ? begin + lane : 4 * high + lane - 4;
    if (lane < 4 ? side < 4 * low : lane < 8 && side < end)
        *reinterpret_cast<unsigned *>(out + 4 * side) = words[side];
    if (part.low && lane == 8) *reinterpret_cast<unsigned short *>(out + 4 * begin - 2) = words[begin - 1] >> 16;
    if (part.high && lane == 9) *reinterpret_cast<unsigned short *>(out + 4 * end) = words[end];
}

PROGRAM norm_settled(const ELEMENT *x, ELEMENT *y, const WEIGHT *weight, const WEIGHT *bias, float *means,
                     float *rstds, int rows, int columns, long long x_stride, float eps) {
    __shared__ Mail<Moments> mail;
    __shared__ Mail<Moments> looks;
    const int program = blockIdx.x / CLUSTER, programs = gridDim.x / CLUSTER;
    const int turns = program < rows ? (rows - program + programs - 1) / programs : 0;
    const float share = 1.f / columns;
    const auto row_of = [&](int turn) { return program + (long long)turn * programs; };
    const Part part(columns, int((unsigned long long)(x + program * x_stride) % 4 / sizeof(ELEMENT)));
    const auto in_x = [&](int turn) { return Place(x + row_of(turn) * x_stride, part); };
    const auto fetch_turn = [&](int turn) {
        // Told by a lane, the turn is not known to be the same in all of them: see copy_vector_once.
        if (turn < turns) fetch(slot_of(__shfl_sync(~0u, turn, 0)), in_x(turn), part);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll 1
    for (int turn = 0; turn < AHEAD; turn++) fetch_turn(turn);
    Weights weights;
    if constexpr (HAS_WEIGHT) weights.hold(0, weight, part, columns);
    if constexpr (HAS_BIAS) weights.hold(1, bias, part, columns);
    mail.start();
    if (CENTERED) looks.start();
    int looked = 0;
    Moments before = Moments::none();
#pragma unroll 1
    for (int turn = 0; turn < turns + 1; turn++) {
        Moments found = Moments::none();
        if (turn < turns) {
            asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
            __syncwarp();
            found = gather(words_of(turn, in_x(turn)), part, share);
            mail.post(found, turn);
        }
        if (turn > 0) {
            const Place from = in_x(turn - 1), to(y + row_of(turn - 1) * columns, part);
            unsigned *words = words_of(turn - 1, from);
            const Moments joined = mail.collect(before, turn - 1);
            float mean = joined.mean, variance = joined.square;
            if constexpr (CENTERED) {
                float taken = mean * mean;
                variance -= taken;
                // Not a number, too, as where both are infinite.
#pragma unroll 1
                for (int n = 0; n < 2 && !(variance * CANCELS - taken >= 0.f); n++) {
                    Moments off = centre(words, part, columns, share, mean);
                    looks.post(off, looked);
                    off = looks.collect(off, looked++);
                    mean += off.mean, taken = off.mean * off.mean;
                    variance = fmaf(-off.mean, off.mean, off.square);
                }
            }
            const Normal normal{mean, rstd_of(variance, eps)};
            if (cluster_rank() == 0 && threadIdx.x == 0) {
                if (CENTERED) means[row_of(turn - 1)] = normal.mean;
                rstds[row_of(turn - 1)] = normal.rstd;
            }
            normalise_words(words, part, normal, weights);
            __syncwarp();
            send(to.line + (to.shift - from.shift) * 4, slot_of(turn - 1), from.shift, part);
            __syncwarp();
        }
        fetch_turn(turn + AHEAD);
        before = found;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    mail.meet();
}
