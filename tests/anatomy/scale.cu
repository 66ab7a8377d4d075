// Four floats a thread, by vectors of 16 bytes, and a block's sum through shared memory.
__global__ void scale(const float4* x, float4* y, float* sums, float by) {
    __shared__ float total[256];
    const int i = blockIdx.x * 256 + threadIdx.x;
    const float4 v = x[i];
    y[i] = make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
    total[threadIdx.x] = v.x + v.y + v.z + v.w;
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0;
        for (int k = 0; k < 256; ++k) sum += total[k];
        sums[blockIdx.x] = sum;
    }
}
