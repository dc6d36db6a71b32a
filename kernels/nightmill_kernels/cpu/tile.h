// One tile of attention: the queries of one sequence that share a KV head, against the keys they see.
#ifndef NIGHTMILL_TILE_H
#define NIGHTMILL_TILE_H

#include "nightmill.h"
#include "product.h"

enum {
  SEGMENT = 512,      // keys; a multiple of KEYS
  MAX_ROWS = 128,     // rows of a tile
  STATE = 8192,       // floats of a tile's running sums: 128 rows of 64, 32 rows of 256
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
  float *m;    // [rows] no more than SLACK below the largest score so far, in units of log2; -inf: nothing seen
  float *l;    // [rows, VW] Σ 2^(score - m), lane by lane
};

struct scratch {
  unit q[STATE], k[KEYS * MAX_HEAD_DIM], v[KEYS * MAX_HEAD_DIM];  // groups that are not used as they lie
  float acc[2][STATE], m[2][MAX_ROWS], l[2][MAX_ROWS * VW];
  float scores[STRIP * KEYS];
  uint16_t weights[STRIP * KEYS];
  float gathered[2][GROUP * MAX_HEAD_DIM];  // K and V of a group that is not in one piece
  int32_t low[MAX_ROWS], high[MAX_ROWS];  // keys [low, high) are visible to the row
  const struct tile *ahead;  // NULL, or the tile this thread computes next, from key `ahead_key` on
  int32_t ahead_key;
  int paired;  // pages are groups already: nm_paired
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

#define SLACK 8.0f

#if HAVE_PAIR
// 1 + f (C1 + f (C2 + f · C3)) is 2^f on [0, 1) to 8.6e-5 of its value, the least that three terms can do.
#define EXP2_C1 0.69511682f
#define EXP2_C2 0.22764482f
#define EXP2_C3 0.07706720f

// 2^x for a weight that is rounded to bf16: exact at whole x; 0 for -inf, NaN for NaN.
INLINE __m512 exp2_rough(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(EXP2_C3);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_C2));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_C1));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);  // times 2^floor(x)
}

// Weights of a row's first `groups` groups, in bf16, and their sum added to l.
INLINE void weigh_pairs(const float *x, uint16_t *weights, float *l, int groups, float scale, float base) {
  const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(base);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 total = _mm512_loadu_ps(l);
  for (int g = 0; g < groups; g += 2) {
    const __m512 a = exp2_rough(_mm512_fmadd_ps(_mm512_loadu_ps(x + g * GROUP), factor, shift));
    const __m512 b = g + 1 < groups
        ? exp2_rough(_mm512_fmadd_ps(_mm512_loadu_ps(x + (g + 1) * GROUP), factor, shift)) : _mm512_setzero_ps();
    const __m512bh both = _mm512_cvtne2ps_pbh(b, a);
    total = _mm512_dpbf16_ps(total, both, ones);  // what is summed is what is used
    _mm512_storeu_si512(weights + g * GROUP, (__m512i)both);
  }
  _mm512_storeu_ps(l, total);
}
#endif

INLINE void weigh(float *x, float *l, int width, float scale, float base) {
  vf total = splat(0.0f);
  for (int i = 0; i < width; i += VW) {
    const vf weight = exp2_v(fma_v(load(x, i, 0), splat(scale), splat(base)));
    total += weight;
    store(x, i, weight, 0);
  }
  store(l, 0, load(l, 0, 0) + total, 0);
}

// A row's sums from now on in units of its largest score, `best`.
static __attribute__((noinline)) void raise(struct sums sums, int row, int dim, float best) {
  const float before = sums.m[row];
  if (!(best > before)) return;
  sums.m[row] = best;
  if (before == -INFINITY) return;
  float *acc = sums.acc + (int64_t)row * dim, *l = sums.l + row * VW;
  const vf shrink = exp2_v(splat(before - best));
  for (int i = 0; i < dim; i += VW) store(acc, i, load(acc, i, 0) * shrink, 0);
  store(l, 0, load(l, 0, 0) * shrink, 0);
}

// Scores [rows, KEYS] become weights in place (fp32) or in `weights` (bf16). The sums so far are rescaled when a row's
// scores grow by more than SLACK: weights up to 2^SLACK are as good as weights up to 1, and most blocks need no change.
static void softmax(const struct nm_attention *call, struct scratch *s, struct sums sums, int row, int rows, int block,
                    int groups, int pair) {
  const float scale = (call->softcap > 0.0f ? call->softcap : call->scale) * LOG2E;
  const float inverse = 1.0f / scale;
  const int width = groups * GROUP;
  for (int r = 0; r < rows; r++) {
    float *x = s->scores + r * KEYS;
    const int low = s->low[row + r] - block, high = s->high[row + r] - block;
    if (call->softcap > 0.0f) cap_row(x, width, call->scale / call->softcap);
    if (low > 0 || high < width) mask_row(x, width, low, high);
    vf top = load(x, 0, 0);
    for (int i = VW; i < width; i += VW) top = vmax(load(x, i, 0), top);
    if (any_above(top, splat((sums.m[row + r] + SLACK) * inverse)))
      raise(sums, row + r, call->head_dim, hmax(top) * scale);
    const float m = sums.m[row + r], base = m == -INFINITY ? 0.0f : -m;
#if HAVE_PAIR
    if (pair) {
      weigh_pairs(x, s->weights + r * KEYS, sums.l + (row + r) * VW, groups, scale, base);
      continue;
    }
#endif
    (void)pair;
    weigh(x, sums.l + (row + r) * VW, width, scale, base);
  }
}

// ---------------------------------------------------------------- one block of keys

INLINE void strip_of(const struct nm_attention *call, struct scratch *s, struct sums sums, int row, int key,
                     int groups, const struct block *block, const int R, const int pair, const int ahead) {
  const int dim = call->head_dim, units = pair ? dim / 2 : dim;
  scores_of(s->scores, s->q + (int64_t)row * units, units, block, groups, R, pair, ahead);
  softmax(call, s, sums, row, R, key, groups, pair);
  add_values(sums.acc + (int64_t)row * dim, dim, pair ? (const unit *)s->weights : (const unit *)s->scores, block,
             groups, R, pair, ahead);
}

// Strips of about the same height, each against the keys that its last row sees: rows stand in the order of positions.
INLINE void strips_of(const struct nm_attention *call, struct scratch *s, struct sums sums, int rows, int key,
                      int groups, const struct block *block, const int pair, const int ahead) {
  const int count = (rows + STRIP - 1) / STRIP;
  for (int i = 0, row = 0; i < count; i++) {
    const int height = (rows - row + count - i - 1) / (count - i);
    const int seen = smaller(groups, (s->high[row + height - 1] - key + GROUP - 1) / GROUP);
    if (seen > 0) {
      switch (height) {
        case 1: strip_of(call, s, sums, row, key, seen, block, 1, pair, ahead); break;
        case 2: strip_of(call, s, sums, row, key, seen, block, 2, pair, ahead); break;
        case 3: strip_of(call, s, sums, row, key, seen, block, 3, pair, ahead); break;
        case 4: strip_of(call, s, sums, row, key, seen, block, 4, pair, ahead); break;
        case 5: strip_of(call, s, sums, row, key, seen, block, 5, pair, ahead); break;
        default: strip_of(call, s, sums, row, key, seen, block, 6, pair, ahead); break;
      }
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

// Plain pages: groups are packed into the scratch. V is left where it is when it lies as the products take it.
INLINE void pack_block(const struct nm_attention *call, const struct tile *tile, struct scratch *s, int key, int groups,
                       struct block *block, const int bf16, const int pair) {
  const int dim = call->head_dim, has_next = key + KEYS < tile->high;
  const struct tile *next = has_next ? tile : s->ahead;
  for (int g = 0; g < groups; g++) {
    // A bit at a time: a processor keeps few requests to memory open, and stands still while there are more.
    if (next) prefetch(call, next, (has_next ? key + KEYS : s->ahead_key) + g * GROUP, GROUP);
    unit *k = s->k + g * GROUP * (pair ? dim / 2 : dim), *v = s->v + g * GROUP * (pair ? dim / 2 : dim);
    const void *found[2];
    void *const spare[2] = {s->gathered[0], bf16 ? (void *)s->gathered[1] : (void *)v};
    group_of(call, tile, key + g * GROUP, spare, found);
    pack_k(found[0], dim, k, bf16, pair);
    if (bf16) pack_v(found[1], dim, v, bf16, pair);
    block->k[g] = k;
    block->v[g] = bf16 ? v : found[1];
  }
}

#if HAVE_PAIR
// A group's V with zeros for the keys outside [first, last): their slots may hold NaN.
static const unit *seen_values(const unit *from, unit *out, int dim, int first, int last) {
  for (int key = 0; key < GROUP; key += 2) {
    const uint32_t even = key >= first && key < last ? 0xffffu : 0, odd = key + 1 >= first && key + 1 < last ? 0xffffu : 0;
    const __m512i mask = _mm512_set1_epi32((int)(even | odd << 16));
    for (int i = key / 2 * dim; i < (key / 2 + 1) * dim; i += VW)
      _mm512_storeu_si512(out + i, _mm512_and_si512(_mm512_loadu_si512(from + i), mask));
  }
  return out;
}

// Where the groups of a block of paired pages lie, from key `first` on; groups that no row sees: NULL.
static void locate_groups(const struct nm_attention *call, const struct tile *tile, int first, const unit *k[],
                          const unit *v[]) {
  for (int g = 0; g < KEYS / GROUP; g++) {
    const int key = first + g * GROUP;
    k[g] = v[g] = NULL;
    if (key + GROUP <= tile->low || key >= tile->high) continue;
    int run;
    const int64_t at = locate(call, tile, key, &run);
    k[g] = (const unit *)((const char *)call->k_pool + at);
    v[g] = (const unit *)((const char *)call->v_pool + at);
  }
}

// Paired pages are used where they lie, but for values that nobody sees.
static void find_block(const struct nm_attention *call, const struct tile *tile, struct scratch *s, int first,
                       struct block *block) {
  const int dim = call->head_dim;
  locate_groups(call, tile, first, block->k, block->v);
  for (int g = 0; g < KEYS / GROUP; g++) {
    const int key = first + g * GROUP, low = tile->low - key, high = tile->high - key;
    unit *spare = s->v + g * GROUP / 2 * dim;
    if (block->k[g] == NULL)
      block->k[g] = block->v[g] = memset(spare, 0, sizeof(unit) * GROUP / 2 * (size_t)dim);
    else if (low > 0 || high < GROUP)
      block->v[g] = seen_values(block->v[g], spare, dim, low, high);
  }
}

// Where the block after this one lies, in this tile or the next one.
static void find_next(const struct nm_attention *call, const struct tile *tile, const struct scratch *s, int first,
                      struct block *block) {
  const int has_next = first + KEYS < tile->high;
  const unit *k[KEYS / GROUP] = {NULL}, *v[KEYS / GROUP] = {NULL};
  if (has_next || s->ahead)
    locate_groups(call, has_next ? tile : s->ahead, has_next ? first + KEYS : s->ahead_key, k, v);
  for (int g = 0; g < KEYS / GROUP; g++) {
    block->next_k[g] = (const char *)(k[g] ? k[g] : block->k[g]);
    block->next_v[g] = (const char *)(v[g] ? v[g] : block->v[g]);
  }
}

static void fetch_next(const struct block *block, int dim) {
  for (int g = 0; g < KEYS / GROUP; g++)
    for (int byte = 0; byte < GROUP * dim * 2; byte += 64) {
      __builtin_prefetch(block->next_k[g] + byte, 0, 2);
      __builtin_prefetch(block->next_v[g] + byte, 0, 2);
    }
}
#endif

INLINE void block_in(const struct nm_attention *call, const struct tile *tile, struct scratch *s, struct sums sums,
                     int rows, int key, const int bf16, const int pair) {
  const int groups = smaller(KEYS, tile->high - key + GROUP - 1) / GROUP;
  struct block block;
#if HAVE_PAIR
  if (pair && s->paired) {
    find_block(call, tile, s, key, &block);
    find_next(call, tile, s, key, &block);
    if (rows > STRIP) fetch_next(&block, call->head_dim);
    strips_of(call, s, sums, rows, key, groups, &block, pair, rows <= STRIP);
    return;
  }
#endif
  pack_block(call, tile, s, key, groups, &block, bf16, pair);
  strips_of(call, s, sums, rows, key, groups, &block, pair, 0);
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
  s->paired = nm_paired(call->dtype, call->head_dim, call->page_size);
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
