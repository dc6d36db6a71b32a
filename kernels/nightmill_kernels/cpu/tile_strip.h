// A strip of up to 16 rows against a block of paired keys, by AMX tiles: pages hold K and V as tiles take them.
//
//   scores [rows, 16 keys]     += Q [rows, 32 dims]     · K of a group [16 pairs of dims, 16 keys]
//   sums   [rows, 16 columns]  += weights [rows, 16 keys] · V of a group [8 pairs of keys, 16 columns]
//
// A V tile is half high: two groups would fill it, but lie in one piece or not, and a sum must not depend on that.
#ifndef NIGHTMILL_TILE_STRIP_H
#define NIGHTMILL_TILE_STRIP_H

#include "softmax.h"

#if HAVE_AMX && HAVE_PAIR

#define SUM0 0  // numbers that an instruction can name, so no enum
#define SUM1 1
#define SUM2 2
#define SUM3 3
#define QUERY 4
#define KEY 5
#define WEIGHT 6
#define VALUE 7

// Tiles fit for strips of `rows` rows; nothing where they are so already.
static void shape_tiles(struct scratch *s, int rows) {
  if (s->tile_rows == rows) return;
  s->config = (struct tile_config){
      .palette = 1,
      .rows = {(uint8_t)rows, (uint8_t)rows, (uint8_t)rows, (uint8_t)rows, (uint8_t)rows, 16, (uint8_t)rows, 8},
      .row_bytes = {64, 64, 64, 64, 64, 64, 32, 64}};
  tile_configure(&s->config);
  s->tile_rows = rows;
}

// Before a thread goes on to other things: tiles in use make it slow to switch to another one.
static void release_tiles(struct scratch *s) {
  if (s->tile_rows) tile_release();
  s->tile_rows = 0;
}

static void tile_scores(struct scratch *s, int row, int dim, int groups) {
  const struct block *block = &s->block;
  const int units = dim / 2;
  tile_zero(SUM0);
  tile_zero(SUM1);
  tile_zero(SUM2);
  tile_zero(SUM3);
  for (int u = 0; u < units; u += 16) {
    tile_load(QUERY, s->q + (int64_t)row * units + u, units * 4);
    tile_load(KEY, block->k[0] + u * GROUP, GROUP * 4);
    tile_multiply(SUM0, QUERY, KEY);
    if (groups > 1) {
      tile_load(KEY, block->k[1] + u * GROUP, GROUP * 4);
      tile_multiply(SUM1, QUERY, KEY);
    }
    if (groups > 2) {
      tile_load(KEY, block->k[2] + u * GROUP, GROUP * 4);
      tile_multiply(SUM2, QUERY, KEY);
    }
    if (groups > 3) {
      tile_load(KEY, block->k[3] + u * GROUP, GROUP * 4);
      tile_multiply(SUM3, QUERY, KEY);
    }
  }
  tile_store(SUM0, s->scores, KEYS * 4);
  tile_store(SUM1, s->scores + GROUP, KEYS * 4);
  tile_store(SUM2, s->scores + 2 * GROUP, KEYS * 4);
  tile_store(SUM3, s->scores + 3 * GROUP, KEYS * 4);
}

// Columns [c, c + 32) of the sums.
static void tile_values(const struct scratch *s, float *acc, int dim, int c, int groups) {
  tile_load(SUM0, acc + c, dim * 4);
  tile_load(SUM1, acc + c + 16, dim * 4);
  for (int g = 0; g < groups; g++) {
    tile_load(WEIGHT, s->weights + g * GROUP, KEYS * 2);
    tile_load(VALUE, s->block.v[g] + c, dim * 4);
    tile_multiply(SUM0, WEIGHT, VALUE);
    tile_load(VALUE, s->block.v[g] + c + 16, dim * 4);
    tile_multiply(SUM1, WEIGHT, VALUE);
  }
  tile_store(SUM0, acc + c, dim * 4);
  tile_store(SUM1, acc + c + 16, dim * 4);
}

// Strips of 16 rows and what is left, each against the keys that its last row sees.
static void tile_strips(const struct nm_attention *call, struct scratch *s, struct sums sums, int rows, int key,
                        int groups) {
  const int dim = call->head_dim;
  for (int row = 0; row < rows; row += TILE_ROWS) {
    const int height = smaller(TILE_ROWS, rows - row);
    const int seen = smaller(groups, (s->high[row + height - 1] - key + GROUP - 1) / GROUP);
    if (seen <= 0) continue;
    shape_tiles(s, height);
    tile_scores(s, row, dim, seen);
    softmax(call, s, sums, row, height, key, seen, 1);
    for (int c = 0; c < dim; c += 32) tile_values(s, sums.acc + (int64_t)row * dim, dim, c, seen);
  }
}

#endif
#endif
