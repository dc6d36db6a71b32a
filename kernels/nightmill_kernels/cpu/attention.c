// Causal attention over a page pool, prefill chunks and decodes alike.
//
//   queries of one sequence × the G heads that share a KV head = rows            keys 0 ........ context
//   rows are cut into tiles (≤ MAX_ROWS), tiles into strips of 6    ┌ strip ┐  ┌ block of 64 ┐┌ block ┐┌ …
//   keys into segments (512), segments into blocks (64)             │ Q     │·K│ scores      ││       ││
//   per block: pack K and V once, then for every strip              └───────┘  └─ softmax ───┘└───────┘└ ─·V→ sums
//
// Blocks and segments lie at fixed positions of the sequence, and a row's sums run over them in order: running softmax
// within a segment, then the segments' partial results are merged one by one. So a row's result is a function of its
// query, its position and the keys it sees: the same bits whatever chunk, batch, page size or thread it was computed in.
// A segment may be computed anywhere, which is how one long context is spread over cores.
#include <stdlib.h>

#include "nightmill.h"
#include "tile.h"

enum {
  SEGMENT = 512,      // keys; a multiple of KEYS
  MAX_ROWS = 128,     // rows of a tile
  STATE = 8192,       // floats of a tile's running sums: 128 rows of 64, 32 rows of 256
  GROUP = 16,         // keys packed at a time
  SPLIT_FACTOR = 4,   // fewer tiles than this many per thread: spread segments
};

struct tile {
  int32_t sequence, kv_head, first, count;  // queries [first, first + count) of the sequence
  int32_t low, high;                        // keys [low, high) are visible to some of its rows
  int64_t first_part;                       // its parts lie one after the other
};

struct part {  // a unit of scheduling
  int64_t tile;
  int32_t segment;  // the one segment to sum up into `partial`, or ALL_SEGMENTS: finish the tile
  int64_t partial;  // in floats
};
enum { ALL_SEGMENTS = -1 };

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
};

// One per thread for the life of the thread: no allocation and no page faults in a call.
static _Thread_local struct scratch thread_scratch __attribute__((aligned(64)));

struct work {
  const struct nm_attention *call;
  struct tile *tiles;
  struct part *parts;
  float *partials;
  int64_t num_tiles, num_parts, num_floats;
};

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

INLINE void strip_of(const struct nm_attention *call, struct scratch *s, struct sums sums, int row, int block,
                     int width, const int R, const int pair) {
  const int dim = call->head_dim, units = pair ? dim / 2 : dim;
  product(s->scores, KEYS, s->q + (int64_t)row * units, units, s->k, KEYS, units, KEYS, R, 0, pair);
  softmax(call, s, sums, row, R, block, width, pair);
  const unit *weights = pair ? (const unit *)s->weights : (const unit *)s->scores;
  product(sums.acc + (int64_t)row * dim, dim, weights, pair ? KEYS / 2 : KEYS, s->v, dim, pair ? width / 2 : width,
          dim, R, 1, pair);
}

INLINE void strips_of(const struct nm_attention *call, struct scratch *s, struct sums sums, int rows, int block,
                      int width, const int pair) {
  const int count = (rows + STRIP - 1) / STRIP;
  for (int i = 0, row = 0; i < count; i++) {
    const int height = (rows - row + count - i - 1) / (count - i);
    switch (height) {
      case 1: strip_of(call, s, sums, row, block, width, 1, pair); break;
      case 2: strip_of(call, s, sums, row, block, width, 2, pair); break;
      case 3: strip_of(call, s, sums, row, block, width, 3, pair); break;
      case 4: strip_of(call, s, sums, row, block, width, 4, pair); break;
      case 5: strip_of(call, s, sums, row, block, width, 5, pair); break;
      default: strip_of(call, s, sums, row, block, width, 6, pair); break;
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

// Pages lie anywhere, so the hardware cannot guess the next ones: ask for them while this block is being computed.
static void prefetch(const struct nm_attention *call, const struct tile *tile, int block) {
  const int64_t row = call->head_dim * (call->dtype == NM_BF16 ? 2 : 4);
  const int last = smaller(tile->high, block + KEYS);
  for (int key = larger(tile->low, block), run; key < last; key += run) {
    const int64_t at = locate(call, tile, key, &run);
    run = smaller(run, last - key);
    for (int64_t byte = 0; byte < run * row; byte += 64) {
      __builtin_prefetch((const char *)call->k_pool + at + byte, 0, 2);
      __builtin_prefetch((const char *)call->v_pool + at + byte, 0, 2);
    }
  }
}

// K and V of GROUP keys from `key` on, in one piece. Keys that no row of the tile sees become zeros: their slots may
// hold NaN, which a weight of zero would not hide.
static void group_of(const struct nm_attention *call, const struct tile *tile, struct scratch *s, int key,
                     const void **k, const void **v) {
  const int64_t row = call->head_dim * (call->dtype == NM_BF16 ? 2 : 4);
  int run;
  if (key >= tile->low && key + GROUP <= tile->high) {
    const int64_t at = locate(call, tile, key, &run);
    *k = (const char *)call->k_pool + at;
    *v = (const char *)call->v_pool + at;
    if (run >= GROUP) return;
  }
  memset(s->gathered, 0, sizeof s->gathered);
  const int last = smaller(key + GROUP, tile->high);
  for (int i = larger(key, tile->low); i < last; i += run) {
    const int64_t at = locate(call, tile, i, &run), to = (i - key) * row;
    run = smaller(run, last - i);
    memcpy((char *)s->gathered[0] + to, (const char *)call->k_pool + at, (size_t)(run * row));
    memcpy((char *)s->gathered[1] + to, (const char *)call->v_pool + at, (size_t)(run * row));
  }
  *k = s->gathered[0];
  *v = s->gathered[1];
}

INLINE void block_in(const struct nm_attention *call, const struct tile *tile, struct scratch *s, struct sums sums,
                     int rows, int block, const int bf16, const int pair) {
  const int width = smaller(KEYS, (tile->high - block + GROUP - 1) / GROUP * GROUP), dim = call->head_dim;
  prefetch(call, tile, block + KEYS);
  for (int i = 0; i < width; i += GROUP) {
    const void *k, *v;
    group_of(call, tile, s, block + i, &k, &v);
    pack_k(k, dim, s->k + i, bf16, pair);
    pack_v(v, dim, s->v + (int64_t)(pair ? i / 2 : i) * dim, bf16, pair);
  }
  strips_of(call, s, sums, rows, block, width, pair);
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
  const int length = call->query_starts[tile->sequence + 1] - call->query_starts[tile->sequence];
  for (int i = 0; i < tile->count; i++) {
    const int64_t token = query_start(call, tile) + i;
    const char *q = (const char *)call->q + (token * call->q_stride + (int64_t)tile->kv_head * group * dim) * size;
    unit *to = s->q + (int64_t)i * group * (HAVE_PAIR && bf16 ? dim / 2 : dim);
    if (HAVE_PAIR && bf16)
      memcpy(to, q, (size_t)(group * dim) * 2);
    else
      for (int c = 0; c < group * dim; c += VW) store(to, c, load(q, c, bf16), 0);
    const int high = larger(call->context_lens[tile->sequence] - length + tile->first + i + 1, 0);
    for (int r = i * group; r < (i + 1) * group; r++) {
      s->high[r] = high;
      s->low[r] = call->window > 0 ? larger(high - call->window, 0) : 0;
    }
  }
}

static void segment_of(const struct nm_attention *call, const struct tile *tile, struct scratch *s, struct sums sums,
                       int segment) {
  const int rows = tile->count * (call->heads / call->kv_heads);
  const int first = larger(segment * SEGMENT, tile->low / KEYS * KEYS), last = smaller((segment + 1) * SEGMENT, tile->high);
  clear(sums, rows, call->head_dim);
  for (int block = first; block < last; block += KEYS) block_of(call, tile, s, sums, rows, block);
}

static int num_segments(const struct tile *tile) {
  return tile->high <= tile->low ? 0 : (tile->high - 1) / SEGMENT - tile->low / SEGMENT + 1;
}

static struct sums sums_at(float *at, int rows, int dim) {
  return (struct sums){at, at + (int64_t)rows * dim, at + (int64_t)rows * (dim + 1)};
}

static void run_part(const struct work *work, const struct part *part) {
  const struct nm_attention *call = work->call;
  const struct tile *tile = work->tiles + part->tile;
  struct scratch *s = &thread_scratch;
  __asm__("" : "+r"(s));  // else the compiler looks the thread's address up again in the innermost loops
  const int rows = tile->count * (call->heads / call->kv_heads), dim = call->head_dim;
  load_queries(call, tile, s);
  if (part->segment != ALL_SEGMENTS) {
    segment_of(call, tile, s, sums_at(work->partials + part->partial, rows, dim), part->segment);
    return;
  }
  const struct sums total = {s->acc[0], s->m[0], s->l[0]}, next = {s->acc[1], s->m[1], s->l[1]};
  const int begin = tile->low / SEGMENT, end = begin + num_segments(tile);
  segment_of(call, tile, s, total, begin);
  for (int segment = begin + 1; segment < end; segment++) {
    segment_of(call, tile, s, next, segment);
    merge(total, next, rows, dim);
  }
  emit(call, tile, total);
}

static void run_parts(int64_t first, int64_t last, void *data) {
  const struct work *work = data;
  for (int64_t i = first; i < last; i++) {
    if (i + 1 < last) {
      const struct part *next = work->parts + i + 1;
      const struct tile *tile = work->tiles + next->tile;
      prefetch(work->call, tile, next->segment == ALL_SEGMENTS ? tile->low / KEYS * KEYS : next->segment * SEGMENT);
    }
    run_part(work, work->parts + i);
  }
}

static void merge_tiles(int64_t first, int64_t last, void *data) {
  const struct work *work = data;
  const struct nm_attention *call = work->call;
  for (int64_t i = first; i < last; i++) {
    const struct tile *tile = work->tiles + i;
    const struct part *part = work->parts + tile->first_part;
    if (part->segment == ALL_SEGMENTS) continue;
    const int rows = tile->count * (call->heads / call->kv_heads), dim = call->head_dim;
    const struct sums total = sums_at(work->partials + part->partial, rows, dim);
    for (int k = 1; k < num_segments(tile); k++)
      merge(total, sums_at(work->partials + part[k].partial, rows, dim), rows, dim);
    emit(call, tile, total);
  }
}

// ---------------------------------------------------------------- planning

static int query_len(const struct nm_attention *call, int s) { return call->query_starts[s + 1] - call->query_starts[s]; }

static int check(const struct nm_attention *c) {
  if ((c->dtype != NM_F32 && c->dtype != NM_BF16) || c->head_dim % 16 || c->head_dim > MAX_HEAD_DIM || c->head_dim < 16 ||
      c->heads / c->kv_heads > smaller(MAX_ROWS, STATE / c->head_dim))
    return NM_UNSUPPORTED;
  for (int s = 0; s < c->num_sequences; s++) {
    if (query_len(c, s) < 0 || c->query_starts[s] < 0 || c->query_starts[s + 1] > c->num_tokens) return NM_BAD_STARTS;
    const int64_t context = c->context_lens[s];
    if (context < 0 || context > (int64_t)c->table_width * c->page_size) return NM_BAD_CONTEXT;
    const int64_t low = c->window > 0 ? context - query_len(c, s) + 1 - c->window : 0;
    for (int64_t page = (low > 0 ? low : 0) / c->page_size; page * c->page_size < context; page++) {
      const int32_t id = c->page_tables[(int64_t)s * c->table_width + page];
      if (id < 0 || id >= c->num_pages) return NM_BAD_PAGE;
    }
  }
  return NM_OK;
}

// Tiles of one sequence and KV head; returns how many. NULL only counts.
static int64_t tiles_of(const struct nm_attention *c, int s, int kv_head, int tile_queries, struct tile *out) {
  const int length = query_len(c, s), past = c->context_lens[s] - length;
  const int64_t count = (length + tile_queries - 1) / tile_queries;
  for (int64_t i = 0; out && i < count; i++) {
    // The longest first: a long tile that starts last keeps everyone waiting.
    const int first = (int)(count - 1 - i) * tile_queries, n = smaller(tile_queries, length - first);
    const int high = larger(past + first + n, 0), low = c->window > 0 ? larger(past + first + 1 - c->window, 0) : 0;
    out[i] = (struct tile){s, kv_head, first, n, smaller(low, high), high, 0};
  }
  return count;
}

// KV head by KV head, so that pages shared by many sequences stay in the caches; prefill chunks before decodes.
static int64_t list_tiles(const struct nm_attention *c, struct tile *out) {
  const int tile_queries = larger(1, smaller(MAX_ROWS, STATE / c->head_dim) / (c->heads / c->kv_heads));
  int64_t count = 0;
  for (int decodes = 0; decodes < 2; decodes++)
    for (int h = 0; h < c->kv_heads; h++)
      for (int s = 0; s < c->num_sequences; s++)
        if ((query_len(c, s) == 1) == decodes) count += tiles_of(c, s, h, tile_queries, out ? out + count : NULL);
  return count;
}

static int64_t list_parts(struct work *work, int split, struct part *out) {
  const int group = work->call->heads / work->call->kv_heads;
  int64_t count = 0;
  work->num_floats = 0;
  for (int64_t i = 0; i < work->num_tiles; i++) {
    struct tile *tile = work->tiles + i;
    const int segments = num_segments(tile), begin = tile->low / SEGMENT;
    tile->first_part = count;
    if (!split || segments < 2) {
      if (out) out[count] = (struct part){i, ALL_SEGMENTS, 0};
      count++;
      continue;
    }
    for (int k = 0; k < segments; k++, count++) {
      if (out) out[count] = (struct part){i, begin + k, work->num_floats};
      work->num_floats += (int64_t)tile->count * group * (work->call->head_dim + 1 + VW);
    }
  }
  return count;
}

static void clear_unowned(const struct nm_attention *c) {
  const int64_t size = c->dtype == NM_BF16 ? 2 : 4;
  const int64_t first = c->num_sequences ? c->query_starts[c->num_sequences] : 0;
  for (int64_t t = first; t < c->num_tokens; t++)
    memset((char *)c->out + t * c->out_stride * size, 0, (size_t)((int64_t)c->heads * c->head_dim * size));
}

int nm_paged_attention(const struct nm_attention *call) {
  const int status = check(call);
  if (status != NM_OK) return status;
  clear_unowned(call);
  struct work work = {.call = call};
  work.num_tiles = list_tiles(call, NULL);
  if (work.num_tiles == 0) return NM_OK;
  int result = NM_NO_MEMORY;
  work.tiles = malloc(sizeof(struct tile) * (size_t)work.num_tiles);
  if (!work.tiles) goto done;
  list_tiles(call, work.tiles);
  const int split = call->threads > 1 && work.num_tiles < (int64_t)SPLIT_FACTOR * call->threads;
  work.num_parts = list_parts(&work, split, NULL);
  work.parts = malloc(sizeof(struct part) * (size_t)work.num_parts);
  if (!work.parts) goto done;
  list_parts(&work, split, work.parts);
  if (work.num_floats > 0) {
    work.partials = malloc(sizeof(float) * (size_t)work.num_floats);
    if (!work.partials) goto done;
  }
  // A few at a time where there are many: then the next one's first keys are on their way while one is computed.
  const int64_t plenty = work.num_parts / (8 * larger(1, call->threads));
  nm_for(work.num_parts, plenty < 4 ? plenty : 4, call->threads, run_parts, &work);
  if (work.partials) nm_for(work.num_tiles, 1, call->threads, merge_tiles, &work);
  result = NM_OK;
done:
  free(work.partials);
  free(work.parts);
  free(work.tiles);
  return result;
}
