// The backward of fused attention on a CPU, whole rows of weights at a time. Follows emit/prelude.h.
//
//     P = softmax(scale · Q Kᵀ + mask)        dV = Pᵀ dO
//     dP = dO Vᵀ                              dQ = scale · dS K
//     dS = P ∘ (dP - rowsum(P ∘ dP))          dK = scale · dSᵀ Q
//
// A thread takes one head of keys with the heads of queries that share it, and walks these queries in blocks whose
// rows of P and dP stay in its cache.
// Forward hands over only Q, K, V. Backward normalises the weights by the sum of its own exponentials, and
// forms rowsum(P ∘ dP) from its own dP, all in fp32, so that the terms of a row of dS cancel as well as they
// do in unfused attention.

// BLAS sgemm is column-major: it sees a matrix that is stored by rows here as the transposed one.
typedef void (*tw_gemm_t)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                          const int*, const float*, const int*, const float*, float*, const int*);

struct tw_panel {  // a matrix of fp32 by rows
  float* at;
  int stride;
};

struct tw_attention {  // as AttentionArguments in attention_backward.py; `heads` are those of keys
  float* tensors[7];   // q, k, v, the gradient of the output, dq, dk, dv
  const float* mask;
  float* scratch;
  tw_gemm_t gemm;
  int64_t heads, heads_per_batch, sharing, queries, keys, depth, block, row, causal, scratch_stride;
  int64_t strides[7][3];  // batch, head, row
  int64_t mask_strides[4];
  float scale;
};

TW tw_panel tw_below(tw_panel x, int64_t rows) { return {x.at + rows * x.stride, x.stride}; }
TW void tw_clear(tw_panel x, int64_t rows, int64_t depth) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < depth; ++j) x.at[i * x.stride + j] = 0.0f;
}

// One row of scores s to weights and of dP to dS, both in place; zeros behind the keys that a causal row sees.
TW void tw_attention_row(float* s, float* dp, const float* mask, int64_t mask_stride, int64_t seen, int64_t keys) {
  float top = -TW_INF, sum = 0.0f, dot = 0.0f;
  if (mask)
    for (int64_t j = 0; j < seen; ++j) s[j] += mask[j * mask_stride];
#pragma omp simd reduction(max : top)
  for (int64_t j = 0; j < seen; ++j) top = s[j] > top ? s[j] : top;
  top = top == -TW_INF ? 0.0f : top;  // a row without a key: its exponentials are zeros, not NaN
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < seen; ++j) sum += s[j] = tw_exp(s[j] - top);
  float share = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma omp simd reduction(+ : dot)
  for (int64_t j = 0; j < seen; ++j) dot += (s[j] *= share) * dp[j];
  for (int64_t j = 0; j < seen; ++j) dp[j] = s[j] * (dp[j] - dot);
  for (int64_t j = seen; j < keys; ++j) s[j] = dp[j] = 0.0f;
}

TW tw_panel tw_head(const tw_attention& a, int tensor, int64_t batch, int64_t head) {
  const int64_t* strides = a.strides[tensor];
  return {a.tensors[tensor] + batch * strides[0] + head * strides[1], (int)strides[2]};
}

static void tw_attention_head(const tw_attention& a, int64_t batch, int64_t head, float* p) {
  int64_t shared = head / a.sharing;
  tw_panel k = tw_head(a, 1, batch, shared), v = tw_head(a, 2, batch, shared);
  tw_panel dk = tw_head(a, 5, batch, shared), dv = tw_head(a, 6, batch, shared);
  const float* mask = a.mask ? a.mask + batch * a.mask_strides[0] + head * a.mask_strides[1] : nullptr;
  float* dp = p + a.block * a.row;
  const float one = 1.0f, zero = 0.0f;
  const int d = (int)a.depth, row = (int)a.row;
  for (int64_t first = 0; first < a.queries; first += a.block) {
    int rows = (int)(a.queries - first < a.block ? a.queries - first : a.block);
    int keys = (int)(a.causal && first + rows < a.keys ? first + rows : a.keys);
    tw_panel q = tw_below(tw_head(a, 0, batch, head), first), grad = tw_below(tw_head(a, 3, batch, head), first);
    tw_panel dq = tw_below(tw_head(a, 4, batch, head), first);
    a.gemm("T", "N", &keys, &rows, &d, &a.scale, k.at, &k.stride, q.at, &q.stride, &zero, p, &row);
    a.gemm("T", "N", &keys, &rows, &d, &one, v.at, &v.stride, grad.at, &grad.stride, &zero, dp, &row);
    for (int64_t i = 0; i < rows; ++i) {
      int64_t seen = a.causal && first + i + 1 < keys ? first + i + 1 : keys;
      const float* added = mask ? mask + (first + i) * a.mask_strides[2] : nullptr;
      tw_attention_row(p + i * row, dp + i * row, added, a.mask_strides[3], seen, keys);
    }
    a.gemm("N", "T", &d, &keys, &rows, &one, grad.at, &grad.stride, p, &row, &one, dv.at, &dv.stride);
    a.gemm("N", "N", &d, &rows, &keys, &a.scale, k.at, &k.stride, dp, &row, &zero, dq.at, &dq.stride);
    a.gemm("N", "T", &d, &keys, &rows, &a.scale, q.at, &q.stride, dp, &row, &one, dk.at, &dk.stride);
  }
}

extern "C" void tw_attention_backward(const tw_attention* a, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t number = 0; number < a->heads; ++number) {
    int64_t batch = number / a->heads_per_batch, shared = number % a->heads_per_batch;
    tw_clear(tw_head(*a, 5, batch, shared), a->keys, a->depth);
    tw_clear(tw_head(*a, 6, batch, shared), a->keys, a->depth);
    float* p = a->scratch + omp_get_thread_num() * a->scratch_stride;
    for (int64_t i = 0; i < a->sharing; ++i) tw_attention_head(*a, batch, shared * a->sharing + i, p);
  }
}
