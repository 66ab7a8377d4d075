// Functions of fp32 of which glibc has vector forms (libmvec), to 4 ulp. Its scalar forms round otherwise, and so do its
// narrower vectors. Here all are made of the widest vector's, so that equal operands give equal results in vectors, in
// the elements after a row's last vector, and in every kernel: what equals a maximum does so wherever it stands.

#ifdef TW_LIBMVEC
typedef float tw_floats16 __attribute__((vector_size(64)));
typedef float tw_floats8 __attribute__((vector_size(32)));
typedef float tw_floats4 __attribute__((vector_size(16)));
#ifdef __AVX512F__
typedef tw_floats16 tw_widest;
#define TW_WIDEST "_ZGVeN16"
#define TW_WIDTHS(FORM, name, v) \
  FORM(name, tw_floats16, "_ZGVeN16" v) FORM(name, tw_floats8, "_ZGVdN8" v) FORM(name, tw_floats4, "_ZGVbN4" v)
#elif defined(__AVX2__)
typedef tw_floats8 tw_widest;
#define TW_WIDEST "_ZGVdN8"
#define TW_WIDTHS(FORM, name, v) FORM(name, tw_floats8, "_ZGVdN8" v) FORM(name, tw_floats4, "_ZGVbN4" v)
#elif defined(__AVX__)
typedef tw_floats8 tw_widest;
#define TW_WIDEST "_ZGVcN8"
#define TW_WIDTHS(FORM, name, v) FORM(name, tw_floats8, "_ZGVcN8" v) FORM(name, tw_floats4, "_ZGVbN4" v)
#else
typedef tw_floats4 tw_widest;
#define TW_WIDEST "_ZGVbN4"
#define TW_WIDTHS(FORM, name, v) FORM(name, tw_floats4, "_ZGVbN4" v)
#endif

template <class V> TW tw_widest tw_repeated(V x) {
  tw_widest all;
  for (unsigned i = 0; i < sizeof(all) / sizeof(V); i++) __builtin_memcpy((char*)&all + i * sizeof(V), &x, sizeof(V));
  return all;
}
template <class V> TW V tw_first(tw_widest all) {
  V x;
  __builtin_memcpy(&x, &all, sizeof(V));
  return x;
}
#define TW_OWN static __attribute__((used, noinline))
#define TW_SIMD extern "C" __attribute__((simd("notinbranch"), const))
#define TW_FORM(name, V, symbol)                          \
  TW_OWN V tw_##name##_of(V x) __asm__(symbol "tw_" #name); \
  V tw_##name##_of(V x) { return tw_first<V>(tw_widest_##name(tw_repeated(x))); }
#define TW_FORM2(name, V, symbol)                              \
  TW_OWN V tw_##name##_of(V x, V y) __asm__(symbol "tw_" #name); \
  V tw_##name##_of(V x, V y) { return tw_first<V>(tw_widest_##name(tw_repeated(x), tw_repeated(y))); }
#define TW_LANES(name)                                                                        \
  extern "C" tw_widest tw_widest_##name(tw_widest) noexcept __asm__(TW_WIDEST "v_" #name "f"); \
  TW_WIDTHS(TW_FORM, name, "v_")                                                              \
  TW_FORM(name, float, "")                                                                    \
  TW_SIMD float tw_lanes_##name(float) noexcept __asm__("tw_" #name);
#define TW_LANES2(name)                                                                                   \
  extern "C" tw_widest tw_widest_##name(tw_widest, tw_widest) noexcept __asm__(TW_WIDEST "vv_" #name "f"); \
  TW_WIDTHS(TW_FORM2, name, "vv_")                                                                        \
  TW_FORM2(name, float, "")                                                                               \
  TW_SIMD float tw_lanes_##name(float, float) noexcept __asm__("tw_" #name);
#else
#define TW_LANES(name) TW float tw_lanes_##name(float x) { return tw_##name(x); }
#define TW_LANES2(name) TW float tw_lanes_##name(float x, float y) { return tw_##name(x, y); }
#endif
