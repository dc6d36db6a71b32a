// One tile of attention: the queries of one sequence that share a KV head, against the keys they see.
#ifndef NIGHTMILL_TILE_H
#define NIGHTMILL_TILE_H

#include "nightmill.h"
#include "product.h"

enum {
  SEGMENT = 512,      // keys; a multiple of KEYS
  MAX_ROWS = 128,     // rows of a tile
  STATE = 8192,       // floats of a tile's running sums: 128 rows of 64, 32 rows of 256
  GROUP = 16,         // keys packed at a time
};

struct tile {
  int32_t sequence, kv_head, first, count;  // queries [first, first + count) of the sequence
  int32_t low, high;                        // keys [low, high) are visible to some of its rows
  int64_t first_part;                       // its parts lie one after the other
  const int32_t *members;                   // NULL, or the `count` sequences of a group: a query each, keys all see
  int32_t resume;                           // keys [0, resume) are summed up already: `state` says to what; 0: none
  int64_t state;                            // in floats; a group's tile: its first member's
};

struct sums {  // a tile's running softmax
  float *acc;  // [rows, D], not yet divided by l
  float *m;    // [rows] largest score so far, in units of log2; -inf: nothing seen
  float *l;    // [rows, VW] Σ 2^(score - m), lane by lane
};

struct scratch {
  unit q[STATE], k[KEYS * MAX_HEAD_DIM], v[KEYS * MAX_HEAD_DIM];
  float acc[2][STATE], m[2][MAX_ROWS], l[2][MAX_ROWS * VW];
  float scores[STRIP * KEYS];
  uint16_t weights[STRIP * KEYS];
  float gathered[2][GROUP * MAX_HEAD_DIM];  // K and V of a group that is not in one piece
  int32_t low[MAX_ROWS], high[MAX_ROWS];  // keys [low, high) are visible to the row
  const struct tile *ahead;  // NULL, or the tile this thread computes next, from key `ahead_key` on
  int32_t ahead_key;
};

// One per thread for the life of the thread: no allocation and no page faults in a call.
static _Thread_local struct scratch thread_scratch __attribute__((aligned(64)));

static int smaller(int a, int b) { return a < b ? a : b; }
static int larger(int a, int b) { return a > b ? a : b; }

// ---------------------------------------------------------------- softmax of a strip

static __attribute__((noinline)) void cap_row(float *x, int width, float scale) {
  for (int i = 0; i < width; i += VW) store(x, i, tanh_v(load(x, i, 0) * scale), 0);
}

static __attribute__((noinline)) void mask_row(float *x, int width, int low, int high) {
  for (int i = 0; i < width; i += VW) {
    const vi key = lane_index() + i;
    store(x, i, choose((key >= low) & (key < high), load(x, i, 0), splat(-INFINITY)), 0);
  }
}

static __attribute__((noinline)) void rescale(float *acc, int dim, float *l, float exponent) {
  const vf shrink = exp2_v(splat(exponent));
  for (int i = 0; i < dim; i += VW) store(acc, i, load(acc, i, 0) * shrink, 0);
  store(l, 0, load(l, 0, 0) * shrink, 0);
}

// Scores [rows, KEYS] become weights in place (fp32) or in `weights` (bf16); the sums so far are rescaled when a row's
// maximum grows.
static void softmax(const struct nm_attention *call, struct scratch *s, struct sums sums, int row, int rows, int block,
                    int width, int pair) {
  const float scale = (call->softcap > 0.0f ? call->softcap : call->scale) * LOG2E;
  const int dim = call->head_dim;
  vf top[STRIP];
  for (int r = 0; r < rows; r++) {
    float *x = s->scores + r * KEYS;
    const int low = s->low[row + r] - block, high = s->high[row + r] - block;
    if (call->softcap > 0.0f) cap_row(x, width, call->scale / call->softcap);
    if (low > 0 || high < width) mask_row(x, width, low, high);
    top[r] = load(x, 0, 0);
    for (int i = VW; i < width; i += VW) top[r] = vmax(load(x, i, 0), top[r]);
  }
  for (int r = 0; r < rows; r++) {
    const float before = sums.m[row + r], best = hmax(top[r]) * scale, m = best > before ? best : before;
    const vf base = splat(m == -INFINITY ? 0.0f : -m);
    float *x = s->scores + r * KEYS, *l = sums.l + (row + r) * VW;
    vf total = splat(0.0f);
    for (int i = 0; i < width; i += VW) {
      const vf weight = exp2_v(fma_v(load(x, i, 0), splat(scale), base));
      total += weight;
#if HAVE_PAIR
      if (pair) {
        const __m256i narrow = (__m256i)_mm512_cvtneps_pbh((__m512)weight);
        _mm256_storeu_si256((__m256i *)(s->weights + r * KEYS + i), narrow);
        continue;
      }
#endif
      store(x, i, weight, 0);
    }
    (void)pair;
    if (m > before) {
      sums.m[row + r] = m;
      if (before != -INFINITY) rescale(sums.acc + (int64_t)(row + r) * dim, dim, l, before - m);
    }
    store(l, 0, load(l, 0, 0) + total, 0);
  }
}

// ---------------------------------------------------------------- one block of keys

// `values`: the block's groups of V as they lie, or NULL when they are packed in the scratch.
INLINE void strip_of(const struct nm_attention *call, struct scratch *s, struct sums sums, int row, int block,
                     int width, const void *const *values, const int R, const int pair) {
  const int dim = call->head_dim, units = pair ? dim / 2 : dim;
  product(s->scores, KEYS, s->q + (int64_t)row * units, units, s->k, KEYS, units, KEYS, R, 0, pair);
  softmax(call, s, sums, row, R, block, width, pair);
  const unit *weights = pair ? (const unit *)s->weights : (const unit *)s->scores;
#if HAVE_PAIR
  if (pair && values) {
    product_v(sums.acc + (int64_t)row * dim, dim, weights, KEYS / 2, values, width, R);
    return;
  }
#endif
  (void)values;
  product(sums.acc + (int64_t)row * dim, dim, weights, pair ? KEYS / 2 : KEYS, s->v, dim, pair ? width / 2 : width,
          dim, R, 1, pair);
}

INLINE void strips_of(const struct nm_attention *call, struct scratch *s, struct sums sums, int rows, int block,
                      int width, const void *const *values, const int pair) {
  const int count = (rows + STRIP - 1) / STRIP;
  for (int i = 0, row = 0; i < count; i++) {
    const int height = (rows - row + count - i - 1) / (count - i);
    switch (height) {
      case 1: strip_of(call, s, sums, row, block, width, values, 1, pair); break;
      case 2: strip_of(call, s, sums, row, block, width, values, 2, pair); break;
      case 3: strip_of(call, s, sums, row, block, width, values, 3, pair); break;
      case 4: strip_of(call, s, sums, row, block, width, values, 4, pair); break;
      case 5: strip_of(call, s, sums, row, block, width, values, 5, pair); break;
      default: strip_of(call, s, sums, row, block, width, values, 6, pair); break;
    }
    row += height;
  }
}

// Byte offset of a key's row in both pools, and how many keys from it on lie in one piece.
static int64_t locate(const struct nm_attention *call, const struct tile *tile, int key, int *run) {
  const int64_t size = call->dtype == NM_BF16 ? 2 : 4;
  const int page = key / call->page_size, offset = key % call->page_size;
  const int64_t id = call->page_tables[(int64_t)tile->sequence * call->table_width + page];
  *run = call->page_size - offset;
  return (id * call->pool_stride + ((int64_t)tile->kv_head * call->page_size + offset) * call->head_dim) * size;
}

// Pages lie anywhere, so the hardware cannot guess the next ones: ask for `count` keys while others are being computed.
static void prefetch(const struct nm_attention *call, const struct tile *tile, int first, int count) {
  const int64_t row = call->head_dim * (call->dtype == NM_BF16 ? 2 : 4);
  const int last = smaller(tile->high, first + count);
  for (int key = larger(tile->low, first), run; key < last; key += run) {
    const int64_t at = locate(call, tile, key, &run);
    run = smaller(run, last - key);
    for (int64_t byte = 0; byte < run * row; byte += 64) {
      __builtin_prefetch((const char *)call->k_pool + at + byte, 0, 2);
      __builtin_prefetch((const char *)call->v_pool + at + byte, 0, 2);
    }
  }
}

// K and V of GROUP keys from `key` on, in one piece: where they lie, or gathered into `spare`. Keys that no row of the
// tile sees become zeros: their slots may hold NaN, which a weight of zero would not hide.
static void group_of(const struct nm_attention *call, const struct tile *tile, int key, void *const spare[2],
                     const void *found[2]) {
  const int64_t row = call->head_dim * (call->dtype == NM_BF16 ? 2 : 4);
  const char *const pools[2] = {call->k_pool, call->v_pool};
  int run;
  if (key >= tile->low && key + GROUP <= tile->high) {
    const int64_t at = locate(call, tile, key, &run);
    for (int i = 0; i < 2; i++) found[i] = pools[i] + at;
    if (run >= GROUP) return;
  }
  for (int i = 0; i < 2; i++) found[i] = memset(spare[i], 0, (size_t)(GROUP * row));
  const int last = smaller(key + GROUP, tile->high);
  for (int i = larger(key, tile->low); i < last; i += run) {
    const int64_t at = locate(call, tile, i, &run), to = (i - key) * row;
    run = smaller(run, last - i);
    for (int j = 0; j < 2; j++) memcpy((char *)spare[j] + to, pools[j] + at, (size_t)(run * row));
  }
}

INLINE void block_in(const struct nm_attention *call, const struct tile *tile, struct scratch *s, struct sums sums,
                     int rows, int block, const int bf16, const int pair) {
  const int width = smaller(KEYS, (tile->high - block + GROUP - 1) / GROUP * GROUP), dim = call->head_dim;
  const int in_place = pair && rows <= STRIP && dim % 64 == 0;
  const void *values[KEYS / GROUP];
  const int has_next = block + KEYS < tile->high;
  const struct tile *next = has_next ? tile : s->ahead;
  for (int i = 0; i < width; i += GROUP) {
    // A bit at a time: a processor keeps few requests to memory open, and stands still while there are more.
    if (next) prefetch(call, next, (has_next ? block + KEYS : s->ahead_key) + i, GROUP);
    const void *found[2];
    // V that stays in place does not need its scratch: gathered groups go there.
    void *const spare[2] = {s->gathered[0], in_place ? (void *)(s->v + (int64_t)i * MAX_HEAD_DIM) : s->gathered[1]};
    group_of(call, tile, block + i, spare, found);
    pack_k(found[0], dim, s->k + i, bf16, pair);
    values[i / GROUP] = found[1];
    if (!in_place) pack_v(found[1], dim, s->v + (int64_t)(pair ? i / 2 : i) * dim, bf16, pair);
  }
  strips_of(call, s, sums, rows, block, width, in_place ? values : NULL, pair);
}

static void block_of(const struct nm_attention *call, const struct tile *tile, struct scratch *s, struct sums sums,
                     int rows, int block) {
  if (call->dtype == NM_F32)
    block_in(call, tile, s, sums, rows, block, 0, 0);
  else
    block_in(call, tile, s, sums, rows, block, 1, HAVE_PAIR);
}

// ---------------------------------------------------------------- tiles

static void clear(struct sums sums, int rows, int dim) {
  memset(sums.acc, 0, sizeof(float) * (size_t)rows * (size_t)dim);
  memset(sums.l, 0, sizeof(float) * (size_t)rows * VW);
  for (int r = 0; r < rows; r++) sums.m[r] = -INFINITY;
}

// into ⊕= from, by the larger maximum. A side that has seen nothing leaves the other as it is, bit for bit.
static void merge(struct sums into, struct sums from, int rows, int dim) {
  for (int r = 0; r < rows; r++) {
    if (hsum(load(from.l, r * VW, 0)) == 0.0f) continue;  // not by m: a NaN among the scores must get through
    const float m = into.m[r] > from.m[r] ? into.m[r] : from.m[r];
    const vf a = exp2_v(splat(into.m[r] - m)), b = exp2_v(splat(from.m[r] - m));
    float *x = into.acc + (int64_t)r * dim;
    const float *y = from.acc + (int64_t)r * dim;
    for (int i = 0; i < dim; i += VW) store(x, i, fma_v(load(x, i, 0), a, load(y, i, 0) * b), 0);
    store(into.l, r * VW, fma_v(load(into.l, r * VW, 0), a, load(from.l, r * VW, 0) * b), 0);
    into.m[r] = m;
  }
}

static int query_start(const struct nm_attention *call, const struct tile *tile) {
  return call->query_starts[tile->sequence] + tile->first;
}

// Where a tile's row stands among the tokens, and the keys [0, high) it sees.
static int64_t query_at(const struct nm_attention *call, const struct tile *tile, int i, int *high) {
  if (tile->members) {
    *high = tile->high;
    return call->query_starts[tile->members[i]];
  }
  const int length = call->query_starts[tile->sequence + 1] - call->query_starts[tile->sequence];
  *high = larger(call->context_lens[tile->sequence] - length + tile->first + i + 1, 0);
  return query_start(call, tile) + i;
}

static void emit(const struct nm_attention *call, const struct tile *tile, struct sums sums) {
  const int group = call->heads / call->kv_heads, dim = call->head_dim, bf16 = call->dtype == NM_BF16;
  const int64_t size = bf16 ? 2 : 4;
  for (int r = 0; r < tile->count * group; r++) {
    const int64_t token = query_start(call, tile) + r / group;
    char *out = (char *)call->out + token * call->out_stride * size;
    const int64_t at = (int64_t)(tile->kv_head * group + r % group) * dim;
    const float total = hsum(load(sums.l, r * VW, 0));
    const vf share = splat(total == 0.0f ? 0.0f : 1.0f / total);
    for (int i = 0; i < dim; i += VW) store(out, at + i, load(sums.acc + (int64_t)r * dim, i, 0) * share, bf16);
  }
}

static void load_queries(const struct nm_attention *call, const struct tile *tile, struct scratch *s) {
  const int group = call->heads / call->kv_heads, dim = call->head_dim, bf16 = call->dtype == NM_BF16;
  const int64_t size = bf16 ? 2 : 4;
  for (int i = 0; i < tile->count; i++) {
    int high;
    const int64_t token = query_at(call, tile, i, &high);
    const char *q = (const char *)call->q + (token * call->q_stride + (int64_t)tile->kv_head * group * dim) * size;
    unit *to = s->q + (int64_t)i * group * (HAVE_PAIR && bf16 ? dim / 2 : dim);
    if (HAVE_PAIR && bf16)
      memcpy(to, q, (size_t)(group * dim) * 2);
    else
      for (int c = 0; c < group * dim; c += VW) store(to, c, load(q, c, bf16), 0);
    for (int r = i * group; r < (i + 1) * group; r++) {
      s->high[r] = high;
      s->low[r] = call->window > 0 ? larger(high - call->window, 0) : 0;
    }
  }
}

// Adds what is left of a segment from key `first` on, the begin of a block.
static void rest_of_segment(const struct nm_attention *call, const struct tile *tile, struct scratch *s,
                            struct sums sums, int first) {
  const int rows = tile->count * (call->heads / call->kv_heads);
  const int last = smaller((first / SEGMENT + 1) * SEGMENT, tile->high);
  for (int block = first; block < last; block += KEYS) block_of(call, tile, s, sums, rows, block);
}

static void segment_of(const struct nm_attention *call, const struct tile *tile, struct scratch *s, struct sums sums,
                       int segment) {
  clear(sums, tile->count * (call->heads / call->kv_heads), call->head_dim);
  rest_of_segment(call, tile, s, sums, larger(segment * SEGMENT, tile->low / KEYS * KEYS));
}

#endif
