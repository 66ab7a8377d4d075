// The numbers of PyTorch's CPU generator, drawn again from a saved state wherever a kernel needs them.
// MT19937 as in Matsumoto and Nishimura, ACM TOMACS 8(1), 1998; 624 words a block, two words an element.
// A draw is saved as 8 rows of 626 words: the last word before a block, the block's state, and one number:
// in row 0 the word that the draw begins with, in row 1 how many blocks lie between two rows.

typedef unsigned long uint64_t;
typedef uint64_t __attribute__((aligned(4), may_alias)) tw_pair;

#define TW_BLOCK 624
#define TW_ROWS 8
#define TW_ROW 626

TW uint32_t tw_temper(uint32_t y) {
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}
TW uint32_t tw_twist(uint32_t far, uint32_t here, uint32_t next) {
  uint32_t y = (here & 0x80000000u) | (next & 0x7fffffffu);
  return far ^ (y >> 1) ^ (next & 1u ? 0x9908b0dfu : 0u);
}
TW void tw_next_block(uint32_t* s) {
#pragma omp simd
  for (int i = 0; i < 227; ++i) s[i] = tw_twist(s[i + 397], s[i], s[i + 1]);
#pragma omp simd safelen(128)
  for (int i = 227; i < 623; ++i) s[i] = tw_twist(s[i - 227], s[i], s[i + 1]);
  s[623] = tw_twist(s[396], s[623], s[0]);
}

struct tw_stream {
  int64_t block;            // which block `kept` belongs to; -1: none yet
  uint32_t before;          // the last word of the block before
  uint32_t state[TW_BLOCK];
  uint8_t kept[TW_BLOCK / 2];
};

// The block's elements: an element keeps where its 53 low bits are below the threshold.
TW void tw_compare(tw_stream* s, bool odd, int64_t threshold) {
  uint32_t words[TW_BLOCK + 1];
  words[0] = s->before;
#pragma omp simd
  for (int i = 0; i < TW_BLOCK; ++i) words[i + 1] = tw_temper(s->state[i]);
  const tw_pair* pairs = (const tw_pair*)(words + !odd);
#pragma omp simd
  for (int i = 0; i < TW_BLOCK / 2; ++i) {
    uint64_t w = pairs[i];
    int64_t bits = (int64_t)(((w & 0x1fffffu) << 32) | (w >> 32));
    s->kept[i] = bits < threshold;
  }
}

static void __attribute__((noinline)) tw_seek(tw_stream* s, const int32_t* saved, int64_t block, int64_t threshold) {
  int64_t row = block / saved[2 * TW_ROW - 1], first = row * saved[2 * TW_ROW - 1];
  if (s->block < first || s->block > block) {
    const uint32_t* from = (const uint32_t*)saved + row * TW_ROW;
    s->before = from[0];
    for (int i = 0; i < TW_BLOCK; ++i) s->state[i] = from[i + 1];
    s->block = first;
  }
  for (; s->block < block; ++s->block) {
    s->before = tw_temper(s->state[TW_BLOCK - 1]);
    tw_next_block(s->state);
  }
  tw_compare(s, saved[TW_ROW - 1] & 1, threshold);
}

// Whether each of `count` elements from `first` on is kept.
TW void tw_draw(tw_stream* s, const int32_t* saved, int64_t first, int64_t count, int64_t threshold, uint8_t* kept) {
  for (int64_t word = saved[TW_ROW - 1] + 2 * first; count > 0;) {
    int64_t even = word + (word & 1), block = even / TW_BLOCK, at = even % TW_BLOCK / 2;
    if (s->block != block) tw_seek(s, saved, block, threshold);
    int64_t take = TW_BLOCK / 2 - at < count ? TW_BLOCK / 2 - at : count;
    __builtin_memcpy(kept, s->kept + at, take);
    kept += take, count -= take, word += 2 * take;
  }
}

// Takes `elements` draws from a generator, whose state is laid out as torch.Generator.get_state() gives it.
extern "C" void tw_take(uint64_t* generator, int64_t elements, int32_t* saved) {
  uint32_t state[TW_BLOCK], before = 0;
  for (int i = 0; i < TW_BLOCK; ++i) state[i] = (uint32_t)generator[3 + i];
  int32_t* left = (int32_t*)(generator + 1);
  int64_t begin = TW_BLOCK + 1 - *left, end = begin + 2 * elements;
  int64_t last = (end - 1) / TW_BLOCK, spacing = last / TW_ROWS + 1;
  for (int64_t block = 0;; ++block) {
    if (block % spacing == 0) {
      uint32_t* row = (uint32_t*)saved + block / spacing * TW_ROW;
      row[0] = before;
      for (int i = 0; i < TW_BLOCK; ++i) row[i + 1] = state[i];
    }
    if (block == last) break;
    before = tw_temper(state[TW_BLOCK - 1]);
    tw_next_block(state);
  }
  saved[TW_ROW - 1] = (int32_t)begin;
  saved[2 * TW_ROW - 1] = (int32_t)spacing;
  for (int i = 0; i < TW_BLOCK; ++i) generator[3 + i] = state[i];
  generator[2] = end - last * TW_BLOCK;
  *left = (int32_t)(TW_BLOCK + 1 - (end - last * TW_BLOCK));
}
