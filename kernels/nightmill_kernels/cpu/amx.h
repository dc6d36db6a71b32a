// Tiles: Intel AMX's registers of 16 rows × 64 bytes and its product of bf16 pairs, or (NM_EMULATE_AMX) the same in
// plain C for machines without it, which is how the code on top is tested. The emulation follows the pseudocode of the
// Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2 (TDPBF16PS): elements 2k and 2k + 1 of a row
// are summed apart, over all k, then added to the sum that was there; subnormal numbers are zeros.
#ifndef NIGHTMILL_AMX_H
#define NIGHTMILL_AMX_H

#include "vec.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define HAVE_AMX 1
#elif defined(NM_EMULATE_AMX)
#define HAVE_AMX 1
#else
#define HAVE_AMX 0
#endif

#if HAVE_AMX

enum { TILES = 8, TILE_ROWS = 16 };

struct tile_config {  // what LDTILECFG reads, palette 1
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[TILES], unused_row_bytes[8];
  uint8_t rows[TILES], unused_rows[8];
};

#if !defined(NM_EMULATE_AMX)

// The compiler's own macros do not tell it which memory is read or written: here it may move nothing past them.
#define TILE_FENCED(instruction)          \
  do {                                    \
    __asm__ volatile("" ::: "memory");    \
    instruction;                          \
    __asm__ volatile("" ::: "memory");    \
  } while (0)
#define tile_load(tile, base, stride) TILE_FENCED(_tile_loadd(tile, base, stride))
#define tile_store(tile, base, stride) TILE_FENCED(_tile_stored(tile, base, stride))
#define tile_configure(config) TILE_FENCED(_tile_loadconfig(config))
#define tile_zero(tile) _tile_zero(tile)
#define tile_multiply(sum, a, b) _tile_dpbf16ps(sum, a, b)
#define tile_release() _tile_release()

#else

static _Thread_local struct {
  struct tile_config config;
  uint8_t row[TILES][TILE_ROWS][64];
} tile_file;

static void tile_configure(const struct tile_config *config) {
  memset(&tile_file, 0, sizeof tile_file);
  tile_file.config = *config;
}

static void tile_release(void) { memset(&tile_file, 0, sizeof tile_file); }

static void tile_zero(int tile) { memset(tile_file.row[tile], 0, sizeof tile_file.row[tile]); }

static void tile_load(int tile, const void *base, int64_t stride) {
  tile_zero(tile);
  for (int r = 0; r < tile_file.config.rows[tile]; r++)
    memcpy(tile_file.row[tile][r], (const char *)base + r * stride, tile_file.config.row_bytes[tile]);
}

static void tile_store(int tile, void *base, int64_t stride) {
  for (int r = 0; r < tile_file.config.rows[tile]; r++)
    memcpy((char *)base + r * stride, tile_file.row[tile][r], tile_file.config.row_bytes[tile]);
}

INLINE float no_subnormal(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

INLINE float tile_bf16(int tile, int row, int index) {
  uint16_t x;
  memcpy(&x, tile_file.row[tile][row] + 2 * index, 2);
  return no_subnormal(widen(x));
}

static void tile_multiply(int sum, int a, int b) {
  const int rows = tile_file.config.rows[sum], columns = tile_file.config.row_bytes[sum] / 4;
  const int depth = tile_file.config.row_bytes[a] / 4;
  // The processor raises an exception for shapes that do not fit each other.
  if (tile_file.config.rows[a] != rows || tile_file.config.rows[b] != depth ||
      tile_file.config.row_bytes[b] != tile_file.config.row_bytes[sum])
    __builtin_trap();
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < columns; n++) {
      float even = 0.0f, odd = 0.0f, before;
      for (int k = 0; k < depth; k++) {
        even = no_subnormal(fmaf(tile_bf16(a, m, 2 * k), tile_bf16(b, k, 2 * n), even));
        odd = no_subnormal(fmaf(tile_bf16(a, m, 2 * k + 1), tile_bf16(b, k, 2 * n + 1), odd));
      }
      memcpy(&before, tile_file.row[sum][m] + 4 * n, 4);
      const float after = no_subnormal(no_subnormal(before) + no_subnormal(even + odd));
      memcpy(tile_file.row[sum][m] + 4 * n, &after, 4);
    }
}

#endif
#endif
#endif
