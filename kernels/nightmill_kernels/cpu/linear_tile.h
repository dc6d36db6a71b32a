// The inner product of linear layers: a strip of rows against a panel's weights, in registers.
//
// Operands are 32-bit units: one fp32, or two neighbouring bf16. A panel holds unit after unit of the summed dimension,
// each for PANEL columns, so that a vector is one unit of VW columns; x is read where it lies, a unit for all of them.
// Every output is summed in one register from the first unit to the last, whatever the number of rows.
#ifndef NIGHTMILL_LINEAR_TILE_H
#define NIGHTMILL_LINEAR_TILE_H

#include "linear_work.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define LINEAR_BF16 PAIR
#else
#define LINEAR_BF16 SPLIT
#endif

enum product {
  F32,
  PAIR,   // two bf16 by one instruction
  SPLIT,  // two bf16, widened, one after the other
};

enum {
#if VW == 16
  TILE_VECTORS = 4,
#else
  TILE_VECTORS = 2,
#endif
  TILE = TILE_VECTORS * VW,  // columns of a panel that are summed at once
  DEPTH_BLOCK = 1024,        // units of a panel that are gone through at once: 256 KB, to stay in the L2 cache
  UNROLL = 4,
};

// What is read next, fetched from memory meanwhile.
struct ahead {
  const char *at, *end;
  int lines;  // in UNROLL units
};

INLINE vf even(vu x) { return (vf)(x << 16); }
INLINE vf odd(vu x) { return (vf)(x & 0xffff0000u); }

INLINE void add_unit(vf acc[STRIP_ROWS][TILE_VECTORS], const uint32_t x[STRIP_ROWS], const uint32_t *b, const int R,
                     const int kind) {
  vu column[TILE_VECTORS];
#pragma GCC unroll 4
  for (int j = 0; j < TILE_VECTORS; j++) memcpy(&column[j], b + j * VW, sizeof(vu));
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const vu row = (vu){0} + x[r];
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; j++) {
      if (kind == F32) acc[r][j] = fma_v((vf)row, (vf)column[j], acc[r][j]);
#if defined(__AVX512BF16__)
      if (kind == PAIR)
        acc[r][j] = (vf)_mm512_dpbf16_ps((__m512)acc[r][j], (__m512bh)row, (__m512bh)column[j]);
#endif
      if (kind == SPLIT) {
        acc[r][j] = fma_v(even(row), even(column[j]), acc[r][j]);
        acc[r][j] = fma_v(odd(row), odd(column[j]), acc[r][j]);
      }
    }
  }
}

// acc[r][j] += Σ_d x[r][d] · b[d][j] for R rows.
INLINE void multiply_units(vf acc[STRIP_ROWS][TILE_VECTORS], const char *x, int64_t x_stride, const uint32_t *b,
                           int depth, struct ahead *ahead, const int R, const int kind) {
  int d = 0;
  for (; d + UNROLL <= depth; d += UNROLL) {
    for (int i = 0; i < ahead->lines; i++) __builtin_prefetch(ahead->at + 64 * i, 0, 2);
    ahead->at += 64 * ahead->lines;
#pragma GCC unroll 4
    for (int u = 0; u < UNROLL; u++) {
      uint32_t units[STRIP_ROWS];
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) memcpy(&units[r], x + r * x_stride + 4 * (d + u), 4);
      add_unit(acc, units, b + (int64_t)(d + u) * PANEL, R, kind);
    }
  }
  for (; d < depth; d++) {
    uint32_t units[STRIP_ROWS];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) memcpy(&units[r], x + r * x_stride + 4 * d, 4);
    add_unit(acc, units, b + (int64_t)d * PANEL, R, kind);
  }
}

#endif
