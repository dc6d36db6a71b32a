// One tile of attention: the queries of one sequence that share a KV head, against the keys they see.
#ifndef NIGHTMILL_TILE_H
#define NIGHTMILL_TILE_H

#include "pack.h"
#include "pair_strip.h"
#include "softmax.h"
#include "tile_strip.h"

enum { SEGMENT = 512 };  // keys; a multiple of KEYS

struct tile {
  int32_t sequence, kv_head, first, count;  // queries [first, first + count) of the sequence
  int32_t low, high;                        // keys [low, high) are visible to some of its rows
  int64_t partial;                          // in floats: its segments' results, one after the other; -1: summed at once
  const int32_t *members;                   // NULL, or the `count` sequences of a group: a query each, keys all see
  int32_t resume;                           // keys [0, resume) are summed up already: `state` says to what; 0: none
  int64_t state;                            // in floats; a group's tile: its first member's
  int32_t group;                            // that a group's tile belongs to
};

// Where a tile's keys begin: the first block, and the first group of it that is there (pages below may be gone).
static int first_block(const struct tile *tile) { return larger(tile->resume, tile->low / KEYS * KEYS); }

static int first_group(const struct tile *tile) { return larger(tile->resume, tile->low / GROUP * GROUP); }

// ---------------------------------------------------------------- one block of keys

typedef void strip_fn(const struct nm_attention *call, struct scratch *s, struct sums sums, int row, int key,
                      int groups);

// A function for each height of a strip, so that its sums are registers.
#define STRIP_FN(R, pair, ahead)                                                                                    \
  static __attribute__((noinline)) void strip_##R##_##pair##_##ahead(const struct nm_attention *call,               \
                                                                     struct scratch *s, struct sums sums, int row,  \
                                                                     int key, int groups) {                         \
    strip_of(call, s, sums, row, key, groups, &s->block, R, pair, ahead);                                           \
  }
#define STRIP_FNS(pair, ahead)                                                                            \
  STRIP_FN(1, pair, ahead) STRIP_FN(2, pair, ahead) STRIP_FN(3, pair, ahead) STRIP_FN(4, pair, ahead)    \
  STRIP_FN(5, pair, ahead) STRIP_FN(6, pair, ahead)                                                       \
  static strip_fn *const strip_##pair##_##ahead[STRIP] = {strip_1_##pair##_##ahead, strip_2_##pair##_##ahead, \
      strip_3_##pair##_##ahead, strip_4_##pair##_##ahead, strip_5_##pair##_##ahead, strip_6_##pair##_##ahead};
STRIP_FNS(0, 0)
#if HAVE_PAIR
STRIP_FNS(1, 0)
#if !HAVE_AMX
STRIP_FNS(1, 2)
STRIP_FNS(1, 4)
#endif
#endif

// Strips of about the same height, each against the keys that its last row sees: rows stand in the order of positions.
static void strips_of(const struct nm_attention *call, struct scratch *s, struct sums sums, int rows, int key,
                      int groups, strip_fn *const of_height[STRIP]) {
  const int count = (rows + STRIP - 1) / STRIP;
  for (int i = 0, row = 0; i < count; i++) {
    const int height = (rows - row + count - i - 1) / (count - i);
    const int seen = smaller(groups, (s->high[row + height - 1] - key + GROUP - 1) / GROUP);
    if (seen > 0) of_height[height - 1](call, s, sums, row, key, seen);
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
                       const int bf16, const int pair) {
  const int dim = call->head_dim, has_next = key + KEYS < tile->high;
  const struct tile *next = has_next ? tile : s->ahead;
  for (int g = groups; g < KEYS / GROUP; g++) s->block.k[g] = s->k;
  for (int g = 0; g < groups; g++) {
    // A bit at a time: a processor keeps few requests to memory open, and stands still while there are more.
    if (next) prefetch(call, next, (has_next ? key + KEYS : first_block(next)) + g * GROUP, GROUP);
    unit *k = s->k + g * GROUP * (pair ? dim / 2 : dim), *v = s->v + g * GROUP * (pair ? dim / 2 : dim);
    const void *found[2];
    void *const spare[2] = {s->gathered[0], bf16 ? (void *)s->gathered[1] : (void *)v};
    group_of(call, tile, key + g * GROUP, spare, found);
    pack_k(found[0], dim, k, bf16, pair);
    if (bf16) pack_v(found[1], dim, v, bf16, pair);
    s->block.k[g] = k;
    s->block.v[g] = bf16 ? v : found[1];
  }
}

#if HAVE_PAIR
// A group's V with zeros for the keys outside [first, last): their slots may hold NaN.
static const unit *seen_values(const unit *from, unit *out, int dim, int first, int last) {
  for (int key = 0; key < GROUP; key += 2) {
    const uint32_t even = key >= first && key < last ? 0xffffu : 0;
    const uint32_t odd = key + 1 >= first && key + 1 < last ? 0xffff0000u : 0;
    const __m512i mask = _mm512_set1_epi32((int)(even | odd));
    for (int i = key / 2 * dim; i < (key / 2 + 1) * dim; i += VW)
      _mm512_storeu_si512(out + i, _mm512_and_si512(_mm512_loadu_si512(from + i), mask));
  }
  return out;
}

// Where the groups of a block of paired pages lie, from key `first` on; NULL for groups that no row sees.
static void locate_groups(const struct nm_attention *call, const struct tile *tile, int first, const unit *k[],
                          const unit *v[]) {
  const int32_t *table = call->page_tables + (int64_t)tile->sequence * call->table_width;
  int page = first / call->page_size, offset = first % call->page_size;
  for (int g = 0; g < KEYS / GROUP; g++) {
    const int key = first + g * GROUP;
    k[g] = v[g] = NULL;
    if (key + GROUP > tile->low && key < tile->high) {
      const int64_t in_page = ((int64_t)tile->kv_head * call->page_size + offset) * call->head_dim;
      const int64_t at = table[page] * call->pool_stride + in_page;
      k[g] = (const unit *)((const uint16_t *)call->k_pool + at);
      v[g] = (const unit *)((const uint16_t *)call->v_pool + at);
    }
    offset += GROUP;
    if (offset == call->page_size) page++, offset = 0;
  }
}

// `blocks` of them, 1 or 2, from `key` on: paired pages are used where they lie, but for values that nobody sees. And
// as many after them, in this tile or the next one.
static void find_blocks(const struct nm_attention *call, const struct tile *tile, struct scratch *s, int key,
                        int blocks) {
  struct block *block = &s->block;
  const int dim = call->head_dim, count = blocks * (KEYS / GROUP);
  for (int b = 0; b < blocks; b++)
    locate_groups(call, tile, key + b * KEYS, block->k + b * (KEYS / GROUP), block->v + b * (KEYS / GROUP));
  for (int g = 0; g < count; g++) {
    const int low = tile->low - key - g * GROUP, high = tile->high - key - g * GROUP;
    unit *spare = s->v + g * GROUP / 2 * dim;
    if (block->k[g] == NULL)
      block->k[g] = block->v[g] = memset(spare, 0, sizeof(unit) * GROUP / 2 * (size_t)dim);
    else if (low > 0 || high < GROUP)
      block->v[g] = seen_values(block->v[g], spare, dim, low, high);
  }
  const unit *k[MOST_GROUPS] = {NULL}, *v[MOST_GROUPS] = {NULL};
  const int has_next = key + blocks * KEYS < tile->high;
  const struct tile *next = has_next ? tile : s->ahead;
  const int next_key = has_next ? key + blocks * KEYS : next ? first_block(next) : 0;
  for (int b = 0; next && b < blocks; b++)
    locate_groups(call, next, next_key + b * KEYS, k + b * (KEYS / GROUP), v + b * (KEYS / GROUP));
  for (int g = 0; g < count; g++) {
    block->next_k[g] = (const char *)(k[g] ? k[g] : block->k[g]);
    block->next_v[g] = (const char *)(v[g] ? v[g] : block->v[g]);
  }
}

#if HAVE_AMX
static void fetch_next(const struct block *block, int dim) {
  for (int g = 0; g < KEYS / GROUP; g++)
    for (int byte = 0; byte < GROUP * dim * 2; byte += 64) {
      __builtin_prefetch(block->next_k[g] + byte, 0, 2);
      __builtin_prefetch(block->next_v[g] + byte, 0, 2);
    }
}
#else
// Whether there is a group that the fetch has not asked for, and where.
static int fetch_group(const struct nm_attention *call, struct fetch *fetch, const char **k, const char **v) {
  if (fetch->place == fetch->num_tiles) return 0;
  const struct tile *tile = fetch->tiles[fetch->place];
  int run;
  const int64_t at = locate(call, tile, fetch->key, &run);
  *k = (const char *)call->k_pool + at;
  *v = (const char *)call->v_pool + at;
  fetch->key += GROUP;
  if (fetch->key >= tile->high && ++fetch->place < fetch->num_tiles) 
    fetch->key = first_group(fetch->tiles[fetch->place]);
  return 1;
}

// As strips_of, for tiles that compute for longer than their keys take to arrive: with each strip a group or two are
// asked for, first of the next block, then of what is computed after this tile.
static void busy_strips(const struct nm_attention *call, struct scratch *s, struct sums sums, int rows, int key,
                        int groups) {
  const int count = (rows + STRIP - 1) / STRIP;
  struct block *block = &s->block;
  struct fetch *fetch = &s->fetch;
  const char *next_k[KEYS / GROUP], *next_v[KEYS / GROUP];
  memcpy(next_k, block->next_k, sizeof next_k);
  memcpy(next_v, block->next_v, sizeof next_v);
  int own = 0;
  for (int i = 0, row = 0; i < count; i++) {
    const int height = (rows - row + count - i - 1) / (count - i);
    const int seen = smaller(groups, (s->high[row + height - 1] - key + GROUP - 1) / GROUP);
    fetch->credit += fetch->rate;
    int asked = 0;
    for (; asked < FETCH_GROUPS && own < KEYS / GROUP; asked++, own++) {
      block->next_k[asked] = next_k[own];
      block->next_v[asked] = next_v[own];
    }
    while (asked < FETCH_GROUPS && fetch->credit >= FETCH_UNIT &&
           fetch_group(call, fetch, block->next_k + asked, block->next_v + asked)) {
      fetch->credit -= FETCH_UNIT;
      asked++;
    }
    for (int g = asked; g < FETCH_GROUPS; g++) {
      block->next_k[g] = (const char *)block->k[0];
      block->next_v[g] = (const char *)block->v[0];
    }
    strip_fn *const strip = asked ? strip_1_2[height - 1] : strip_1_0[height - 1];
    if (seen > 0) strip(call, s, sums, row, key, seen);
    row += height;
  }
}
#endif
#endif

static void block_of(const struct nm_attention *call, const struct tile *tile, struct scratch *s, struct sums sums,
                     int rows, int key) {
  const int groups = smaller(KEYS, tile->high - key + GROUP - 1) / GROUP;
#if HAVE_PAIR
  if (s->paired) {
    find_blocks(call, tile, s, key, 1);
#if HAVE_AMX
    fetch_next(&s->block, call->head_dim);
    tile_strips(call, s, sums, rows, key, groups);
#else
    if (rows > STRIP)
      busy_strips(call, s, sums, rows, key, groups);
    else
      strips_of(call, s, sums, rows, key, groups, strip_1_4);
#endif
    return;
  }
  if (call->dtype == NM_BF16) {
    pack_block(call, tile, s, key, groups, 1, 1);
    strips_of(call, s, sums, rows, key, groups, strip_1_0);
    return;
  }
#endif
  if (call->dtype == NM_BF16)
    pack_block(call, tile, s, key, groups, 1, 0);
  else
    pack_block(call, tile, s, key, groups, 0, 0);
  strips_of(call, s, sums, rows, key, groups, strip_0_0);
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
  s->factor = (call->softcap > 0.0f ? call->softcap : call->scale) * LOG2E;
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
  for (int r = 0; r < rows; r++) set_limit(s, r, sums.m[r]);
  int key = first;
#if HAVE_PAIR_STRIP
  if (s->paired && rows <= PAIR_ROWS && call->softcap == 0.0f)
    for (; key + KEYS < last; key += 2 * KEYS) {
      find_blocks(call, tile, s, key, 2);
      pair_of_height[rows - 1](call, s, sums, key, smaller(2 * KEYS, tile->high - key + GROUP - 1) / GROUP);
    }
#endif
  for (; key < last; key += KEYS) block_of(call, tile, s, sums, rows, key);
}

static void segment_of(const struct nm_attention *call, const struct tile *tile, struct scratch *s, struct sums sums,
                       int segment) {
  clear(sums, tile->count * (call->heads / call->kv_heads), call->head_dim);
  rest_of_segment(call, tile, s, sums, larger(segment * SEGMENT, tile->low / KEYS * KEYS));
}

#endif
