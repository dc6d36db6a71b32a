// The inner products of attention: a strip of rows against a block of keys, in registers.
//
// Operands are 32-bit units: one fp32, or (pair) two neighbouring bf16 that one instruction multiplies and sums. Rows
// lie unit after unit. Keys come in groups of 16, wherever each lies, with the summed dimension outermost, so that a
// vector holds one unit of VW columns:
//
//   K of a group  [units of a head][16 keys]      pair: a unit is two neighbouring elements of the head
//   V of a group  [units of keys][head_dim]       pair: a unit is two neighbouring keys
#ifndef NIGHTMILL_PRODUCT_H
#define NIGHTMILL_PRODUCT_H

#include "vec.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAVE_PAIR 1
#else
#define HAVE_PAIR 0
#endif

enum {
  KEYS = 64,          // keys in a block
  GROUP = 16,         // keys in a group
  MOST_GROUPS = 2 * KEYS / GROUP,  // two blocks at a time for PAIR_ROWS rows, see pair_strip.h
  PAIR_ROWS = 3,
  STRIP = 6,          // rows in a strip: with PANEL_VECTORS accumulators each they fill the register file
  MAX_HEAD_DIM = 256,
#if VW == 16
  PANEL_VECTORS = 4,
#else
  PANEL_VECTORS = 2,
#endif
};

typedef uint32_t unit;

// A block of keys, and groups to be asked of memory meanwhile: `ahead` lines with each step of the inner loop. A line
// with every vector that is used (PANEL_VECTORS) is the block after this one; with fewer it is as many groups.
struct block {
  const unit *k[MOST_GROUPS], *v[MOST_GROUPS];  // all of them somewhere, if only to be multiplied in vain
  const char *next_k[MOST_GROUPS], *next_v[MOST_GROUPS];
};

// acc[r][j] += Σ_d a[r][d] · b[j][d] for R rows and N vectors of columns; R, N, pair and ahead are constants.
INLINE void multiply(vf acc[STRIP][PANEL_VECTORS], const unit *a, int64_t a_stride,
                     const unit *const b[PANEL_VECTORS], int64_t b_stride, const char *const next[PANEL_VECTORS],
                     int64_t next_step, int depth, const int R, const int N, const int pair, const int ahead) {
  const unit *low = a, *high = a + 3 * a_stride, *from[PANEL_VECTORS];
#pragma GCC unroll 4
  for (int j = 0; j < N; j++) from[j] = b[j];
  for (int d = 0; d < depth; d++, low++, high++) {
    // Two addresses for six rows, and all of them in registers: the compiler would have some wait in vector registers.
    __asm__("" : "+r"(low), "+r"(high));
    vf column[PANEL_VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) {
      __asm__("" : "+r"(from[j]));
      memcpy(&column[j], from[j] + d * b_stride, sizeof(vf));
      if (j < ahead) __builtin_prefetch(next[j] + d * next_step, 0, 2);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const unit *at = r < 3 ? low + r * a_stride : high + (r - 3) * a_stride;
#if HAVE_PAIR
      if (pair) {
        const __m512bh x = (__m512bh)_mm512_set1_epi32((int)*at);
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) acc[r][j] = (vf)_mm512_dpbf16_ps((__m512)acc[r][j], x, (__m512bh)column[j]);
        continue;
      }
#endif
      (void)pair;
      float x;
      memcpy(&x, at, 4);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) acc[r][j] = fma_v(splat(x), column[j], acc[r][j]);
    }
  }
}

// acc = R rows of `units` units · the keys of the vectors [first, first + N) of the block.
INLINE void multiply_keys(vf acc[STRIP][PANEL_VECTORS], const unit *rows, int units, const struct block *block,
                          const int first, const int R, const int N, const int pair, const int ahead) {
  const unit *from[PANEL_VECTORS];
  const char *next[PANEL_VECTORS];
#pragma GCC unroll 4
  for (int j = 0; j < N; j++) {
    from[j] = block->k[(first + j) * VW / GROUP] + (first + j) * VW % GROUP;
    next[j] = block->next_k[(first + j) * VW / GROUP];
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) acc[r][j] = splat(0.0f);
  multiply(acc, rows, units, from, GROUP, next, 64, units, R, N, pair, ahead);
}

INLINE void score_panel(float *out, const unit *rows, int units, const struct block *block, const int first,
                        const int R, const int N, const int pair, const int ahead) {
  vf acc[STRIP][PANEL_VECTORS];
  multiply_keys(acc, rows, units, block, first, R, N, pair, ahead);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) store(out + r * KEYS, (first + j) * VW, acc[r][j], 0);
}

// Scores of R rows, out[r][16·g + i] that of key i of group g, against the first `groups` groups at least.
INLINE void scores_of(float *out, const unit *rows, int units, const struct block *block, int groups, const int R,
                      const int pair, const int ahead) {
#if VW == 16
  (void)groups;
  score_panel(out, rows, units, block, 0, R, KEYS / VW, pair, ahead);
#else
#pragma GCC unroll 8
  for (int i = 0; i < KEYS / VW; i += PANEL_VECTORS)
    if (i * VW < groups * GROUP) score_panel(out, rows, units, block, i, R, PANEL_VECTORS, pair, ahead);
#endif
}

// out[r][0:N·VW] += weights · V, columns [c, c + N·VW) of V.
INLINE void value_panel(float *out, int head_dim, const unit *weights, int stride, const struct block *block,
                        int groups, int c, const int R, const int N, const int pair, const int ahead) {
  const int depth = pair ? GROUP / 2 : GROUP;  // units of keys in a group
  vf acc[STRIP][PANEL_VECTORS];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) acc[r][j] = load(out + (int64_t)r * head_dim + c, j * VW, 0);
  for (int g = 0; g < groups; g++) {
    const unit *from[PANEL_VECTORS];
    const char *next[PANEL_VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) {
      from[j] = block->v[g] + c + j * VW;
      next[j] = ahead == PANEL_VECTORS ? block->next_v[g] + (c + j * VW) * 4
                                       : block->next_v[j] + (c / (PANEL_VECTORS * VW) * (KEYS / 2) + g * depth) * 64;
    }
    multiply(acc, weights + g * depth, stride, from, head_dim, next,
             ahead == PANEL_VECTORS ? head_dim * 4 : 64, depth, R, N, pair, ahead);
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) store(out + (int64_t)r * head_dim + c, j * VW, acc[r][j], 0);
}

// out[r][head_dim] += weights of R rows, `stride` units between them, · V of the first `groups` groups.
INLINE void add_values(float *out, int head_dim, const unit *weights, int stride, const struct block *block, int groups,
                       const int R, const int pair, const int ahead) {
  int c = 0;
  for (; c + PANEL_VECTORS * VW <= head_dim; c += PANEL_VECTORS * VW)
    value_panel(out, head_dim, weights, stride, block, groups, c, R, PANEL_VECTORS, pair, ahead);
#if VW == 16
  if (head_dim - c >= 2 * VW) {
    value_panel(out, head_dim, weights, stride, block, groups, c, R, 2, pair, ahead);
    c += 2 * VW;
  }
  if (c < head_dim) value_panel(out, head_dim, weights, stride, block, groups, c, R, 1, pair, ahead);
#endif
}

#endif
