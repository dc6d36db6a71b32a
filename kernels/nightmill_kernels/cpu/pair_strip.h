// Up to PAIR_ROWS rows against two blocks of paired keys at once: a decode's few sums fill half the registers with one
// block, and between its two products the processor has nothing else to do. The same sums in the same order as block by
// block: where a score of the second block moves m, the first block's values are added before.
#ifndef NIGHTMILL_PAIR_STRIP_H
#define NIGHTMILL_PAIR_STRIP_H

#include "softmax.h"

#if HAVE_PAIR && !HAVE_AMX
#define HAVE_PAIR_STRIP 1

// acc[b][r][j]: scores of R rows with group j of block b.
INLINE void multiply_two(vf acc[2][STRIP][PANEL_VECTORS], const unit *rows, int units, const struct block *block,
                         const int R) {
#pragma GCC unroll 8
  for (int g = 0; g < MOST_GROUPS; g++)
#pragma GCC unroll 3
    for (int r = 0; r < R; r++) acc[g / 4][r][g % 4] = splat(0.0f);
  for (int d = 0; d < units; d++) {
    __m512bh x[PAIR_ROWS];
#pragma GCC unroll 3
    for (int r = 0; r < R; r++) x[r] = (__m512bh)_mm512_set1_epi32((int)rows[r * units + d]);
#pragma GCC unroll 8
    for (int g = 0; g < MOST_GROUPS; g++) {
      const __m512bh column = (__m512bh)_mm512_loadu_si512(block->k[g] + d * GROUP);
      // Volatile: read where it lies. There are more addresses than registers, and the compiler takes vector registers.
      __builtin_prefetch(((const char *const volatile *)block->next_k)[g] + d * 64, 0, 2);
#pragma GCC unroll 3
      for (int r = 0; r < R; r++)
        acc[g / 4][r][g % 4] = (vf)_mm512_dpbf16_ps((__m512)acc[g / 4][r][g % 4], x[r], column);
    }
  }
}

INLINE void store_scores(float *to, vf acc[STRIP][PANEL_VECTORS], const int R) {
#pragma GCC unroll 3
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < PANEL_VECTORS; j++) store(to + r * KEYS, j * VW, acc[r][j], 0);
}

INLINE void load_scores(vf acc[STRIP][PANEL_VECTORS], const float *from, const int R) {
#pragma GCC unroll 3
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < PANEL_VECTORS; j++) acc[r][j] = load(from + r * KEYS, j * VW, 0);
}

// The second block where m moves for it: after the first one's values, whose weights lie in the scratch.
static __attribute__((noinline)) void add_first_block(struct scratch *s, struct sums sums, int dim, int rows) {
  const unit *weights = (const unit *)s->weights;
  switch (rows) {
    case 1: add_values(sums.acc, dim, weights, KEYS, &s->block, KEYS / GROUP, 1, 1, 0); break;
    case 2: add_values(sums.acc, dim, weights, KEYS, &s->block, KEYS / GROUP, 2, 1, 0); break;
    default: add_values(sums.acc, dim, weights, KEYS, &s->block, KEYS / GROUP, 3, 1, 0);
  }
  for (int g = 0; g < KEYS / GROUP; g++) s->block.v[g] = s->block.v[g + KEYS / GROUP];
  raise_strip(s, sums, 0, rows, dim, KEYS);
}

INLINE void pair_strip(const struct nm_attention *call, struct scratch *s, struct sums sums, int key, int groups,
                       const int R) {
  const int dim = call->head_dim;
  float *const spare = s->scores + PAIR_ROWS * KEYS;
  uint16_t *weights = s->weights;
  vf acc[2][STRIP][PANEL_VECTORS];
  multiply_two(acc, s->q, dim / 2, &s->block, R);
  mask_strip(acc[0], s, 0, key, R, PANEL_VECTORS);
  mask_strip(acc[1], s, 0, key + KEYS, R, PANEL_VECTORS);
  if (__builtin_expect(any_raises(acc[0], s, 0, R, PANEL_VECTORS), 0)) {
    store_scores(spare, acc[1], R);
    raise_in_registers(acc[0], s, sums, 0, dim, R, PANEL_VECTORS);
    load_scores(acc[1], spare, R);
  }
  weigh_registers(acc[0], s, sums, 0, weights, 2 * KEYS, R, PANEL_VECTORS);
  if (__builtin_expect(any_raises(acc[1], s, 0, R, PANEL_VECTORS), 0)) {
    store_scores(s->scores, acc[1], R);
    add_first_block(s, sums, dim, R);
    load_scores(acc[1], s->scores, R);
    groups -= KEYS / GROUP;
  } else {
    weights += KEYS;
  }
  weigh_registers(acc[1], s, sums, 0, weights, 2 * KEYS, R, PANEL_VECTORS);
  add_values(sums.acc, dim, (const unit *)s->weights, KEYS, &s->block, groups, R, 1, PANEL_VECTORS);
}

typedef void pair_fn(const struct nm_attention *call, struct scratch *s, struct sums sums, int key, int groups);
#define PAIR_FN(R)                                                                                                   \
  static __attribute__((noinline)) void pair_##R(const struct nm_attention *call, struct scratch *s,                 \
                                                 struct sums sums, int key, int groups) {                            \
    pair_strip(call, s, sums, key, groups, R);                                                                       \
  }
PAIR_FN(1) PAIR_FN(2) PAIR_FN(3)
static pair_fn *const pair_of_height[PAIR_ROWS] = {pair_1, pair_2, pair_3};

#else
#define HAVE_PAIR_STRIP 0
#endif
#endif
