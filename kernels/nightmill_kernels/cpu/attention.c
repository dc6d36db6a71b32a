// Causal attention over a page pool, prefill chunks and decodes alike.
//
//   queries of one sequence × the G heads that share a KV head = rows            keys 0 ........ context
//   rows are cut into tiles (≤ MAX_ROWS), tiles into strips of 6    ┌ strip ┐  ┌ block of 64 ┐┌ block ┐┌ …
//   keys into segments (512), segments into blocks (64)             │ Q     │·K│ scores      ││       ││
//   per block: pack K and V where pages are plain, then each strip  └───────┘  └─ softmax ───┘└───────┘└ ─·V→ sums
//
// Blocks and segments lie at fixed positions of the sequence, and a row's sums run over them in order: running softmax
// within a segment, then the segments' partial results are merged one by one. So a row's result is a function of its
// query, its position and the keys it sees: the same bits whatever chunk, batch, page size or thread it is computed in.
// A segment may be computed anywhere, which is how one long context is spread over cores. Decodes whose first pages are
// the same have those blocks computed together, see groups.h.
#include <stdlib.h>

#include "groups.h"

enum {
  SPLIT_FACTOR = 4,        // fewer tiles than this many per thread: spread segments
  MAX_PARTIALS = 1 << 24,  // floats of partial results above which they are not spread: 64 MB
};

static int num_segments(const struct tile *tile) {
  return tile->high <= tile->low ? 0 : (tile->high - 1) / SEGMENT - tile->low / SEGMENT + 1;
}

static int64_t partial_size(const struct nm_attention *call, const struct tile *tile) {
  return (int64_t)tile->count * (call->heads / call->kv_heads) * (call->head_dim + 1 + VW);
}

#include "tasks.h"

// Sums a tile up and writes its rows.
static void finish(const struct work *work, const struct tile *tile, struct scratch *s) {
  const struct nm_attention *call = work->call;
  const int rows = tile->count * (call->heads / call->kv_heads), dim = call->head_dim;
  const struct sums total = {s->acc[0], s->m[0], s->l[0]}, next = {s->acc[1], s->m[1], s->l[1]};
  const int begin = tile->low / SEGMENT, end = begin + num_segments(tile);
  int segment = begin + 1;
  load_queries(call, tile, s);
  if (tile->resume > 0)
    segment = resume(call, tile, s, work->states);
  else
    segment_of(call, tile, s, total, begin);
  for (; segment < end; segment++) {
    segment_of(call, tile, s, next, segment);
    merge(total, next, rows, dim);
  }
  emit(call, tile, total);
}

// One segment of a tile, into the place for its result.
static void sum_segment(const struct work *work, const struct tile *tile, struct scratch *s, int segment) {
  const struct nm_attention *call = work->call;
  const int rows = tile->count * (call->heads / call->kv_heads);
  float *to = work->partials + tile->partial + segment * partial_size(call, tile);
  load_queries(call, tile, s);
  segment_of(call, tile, s, sums_at(to, rows, call->head_dim), tile->low / SEGMENT + segment);
}

static void run_tasks(int64_t first, int64_t last, void *data) {
  const struct work *work = data;
  struct scratch *s = &thread_scratch;
  __asm__("" : "+r"(s));  // else the compiler looks the thread's address up again in the innermost loops
  for (int64_t i = first; i < last; i++) {
    const struct task *task = work->tasks + i;
    const struct tile *const *after = work->after + task->first;
    s->ahead = task->count ? after[0] : NULL;
    start_fetch(work->call, task->tile, after, task->count, &s->fetch);
    if (task->tile == NULL)
      ;
    else if (task->tile->members)
      run_group(work->call, task->tile, s, work->groups + task->tile->group, work->states);
    else if (task->segment == ALL_SEGMENTS)
      finish(work, task->tile, s);
    else
      sum_segment(work, task->tile, s, task->segment);
    for (int64_t k = 0; k < task->count; k++) {
      s->ahead = k + 1 < task->count ? after[k + 1] : NULL;
      s->fetch.place = s->fetch.num_tiles;
      finish(work, after[k], s);
    }
  }
#if HAVE_AMX
  release_tiles(s);
#endif
}

static void merge_tiles(int64_t first, int64_t last, void *data) {
  const struct work *work = data;
  const struct nm_attention *call = work->call;
  for (int64_t i = first; i < last; i++) {
    const struct tile *tile = work->tiles + i;
    if (tile->partial < 0) continue;
    const int rows = tile->count * (call->heads / call->kv_heads), dim = call->head_dim;
    float *at = work->partials + tile->partial;
    const struct sums total = sums_at(at, rows, dim);
    for (int k = 1; k < num_segments(tile); k++)
      merge(total, sums_at(at + k * partial_size(call, tile), rows, dim), rows, dim);
    emit(call, tile, total);
  }
}

// ---------------------------------------------------------------- planning

static int query_len(const struct nm_attention *c, int s) { return c->query_starts[s + 1] - c->query_starts[s]; }

static int check(const struct nm_attention *c) {
  if (c->dtype != NM_F32 && c->dtype != NM_BF16) return NM_UNSUPPORTED;
  if (c->head_dim < 16 || c->head_dim > MAX_HEAD_DIM || c->head_dim % 16) return NM_UNSUPPORTED;
  if (c->heads / c->kv_heads > smaller(MAX_ROWS, STATE / c->head_dim)) return NM_UNSUPPORTED;
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

// Queries of a tile, at most `most`: tiles of a sequence are alike, and of whole strips where that is possible.
static int even_tiles(const struct nm_attention *c, int length, int most) {
  const int group = c->heads / c->kv_heads, tiles = (length + most - 1) / most, even = (length + tiles - 1) / tiles;
  int step = 1;
  while (step * group % STRIP && step < STRIP) step++;
  return smaller(most, (even + step - 1) / step * step);
}

// Tiles of one sequence and KV head; returns how many. NULL only counts.
static int64_t tiles_of(const struct nm_attention *c, int s, int kv_head, int most, struct tile *out) {
  const int length = query_len(c, s), past = c->context_lens[s] - length;
  if (length == 0) return 0;
  const int tile_queries = even_tiles(c, length, most);
  const int64_t count = (length + tile_queries - 1) / tile_queries;
  for (int64_t i = 0; out && i < count; i++) {
    // The longest first: a long tile that starts last keeps everyone waiting.
    const int first = (int)(count - 1 - i) * tile_queries, n = smaller(tile_queries, length - first);
    const int high = larger(past + first + n, 0), low = c->window > 0 ? larger(past + first + 1 - c->window, 0) : 0;
    out[i] = (struct tile){.sequence = s, .kv_head = kv_head, .first = first, .count = n, .low = smaller(low, high),
                           .high = high};
  }
  return count;
}

// Prefill chunks before decodes. The KV heads of a sequence follow each other: they lie side by side in its pages, and
// memory is faster the longer the runs that are read.
static int64_t list_tiles(const struct nm_attention *c, struct tile *out) {
  const int tile_queries = larger(1, smaller(PREFILL_ROWS, STATE / c->head_dim) / (c->heads / c->kv_heads));
  int64_t count = 0;
  for (int decodes = 0; decodes < 2; decodes++)
    for (int s = 0; s < c->num_sequences; s++)
      for (int h = 0; h < c->kv_heads && (query_len(c, s) == 1) == decodes; h++)
        count += tiles_of(c, s, h, tile_queries, out ? out + count : NULL);
  return count;
}

// Places for the segments of tiles, if they are to be spread; returns how many floats.
static int64_t place_partials(struct work *work, int spread) {
  int64_t floats = 0;
  for (int64_t i = 0; i < work->num_tiles; i++) {
    struct tile *tile = work->tiles + i;
    const int segments = num_segments(tile);
    tile->partial = spread && segments > 1 && tile->resume == 0 ? floats : -1;
    if (tile->partial >= 0) floats += segments * partial_size(work->call, tile);
  }
  return floats;
}

static void clear_unowned(const struct nm_attention *c) {
  const int64_t size = c->dtype == NM_BF16 ? 2 : 4;
  const int64_t first = c->num_sequences ? c->query_starts[c->num_sequences] : 0;
  for (int64_t t = first; t < c->num_tokens; t++)
    memset((char *)c->out + t * c->out_stride * size, 0, (size_t)((int64_t)c->heads * c->head_dim * size));
}

// The groups' tiles, and where the decodes of groups go on from.
static int plan_groups(struct work *work) {
  const struct nm_attention *call = work->call;
  if (num_groups(call) == 0) return NM_OK;
  work->groups = reserve(GROUPS, sizeof(struct group) * (size_t)call->num_groups);
  work->places = reserve(PLACES, sizeof(struct place) * (size_t)larger(1, call->num_sequences));
  if (!work->groups || !work->places) return NM_NO_MEMORY;
  const int64_t floats = list_groups(call, work->groups, work->places);
  if (floats < 0) return NM_BAD_GROUP;
  work->num_group_tiles = list_group_tiles(call, work->groups, NULL);
  if (work->num_group_tiles == 0) return NM_OK;
  work->states = reserve(STATES, sizeof(float) * (size_t)floats);
  work->group_tiles = reserve(GROUP_TILES, sizeof(struct tile) * (size_t)work->num_group_tiles);
  if (!work->states || !work->group_tiles) return NM_NO_MEMORY;
  list_group_tiles(call, work->groups, work->group_tiles);
  for (int64_t i = 0; i < work->num_tiles; i++) {
    struct tile *tile = work->tiles + i;
    struct place *place = work->places + tile->sequence;
    if (tile->kv_head == 0) place->tile = i;
    if (place->group < 0) continue;
    tile->resume = work->groups[place->group].keys;
    tile->state = state_of(work->groups + place->group, tile->kv_head, place->index);
  }
  return NM_OK;
}

int nm_paired(int dtype, int head_dim, int page_size) {
  return HAVE_PAIR && dtype == NM_BF16 && head_dim % 32 == 0 && head_dim <= MAX_HEAD_DIM && page_size % GROUP == 0;
}

int nm_paged_attention(const struct nm_attention *call) {
  const int status = check(call);
  if (status != NM_OK) return status;
  clear_unowned(call);
  struct work work = {.call = call};
  work.num_tiles = list_tiles(call, NULL);
  if (work.num_tiles == 0) return NM_OK;
  int result = NM_NO_MEMORY;
  work.tiles = reserve(TILES_OF_CALL, sizeof(struct tile) * (size_t)work.num_tiles);
  if (!work.tiles) goto done;
  list_tiles(call, work.tiles);
  result = plan_groups(&work);
  if (result != NM_OK) goto done;
  result = NM_NO_MEMORY;
  const int spread = call->threads > 1 && work.num_tiles < (int64_t)SPLIT_FACTOR * call->threads;
  int64_t floats = place_partials(&work, spread);
  if (floats > MAX_PARTIALS) floats = place_partials(&work, 0);
  if (floats > 0) {
    work.partials = malloc(sizeof(float) * (size_t)floats);
    if (!work.partials) goto done;
  }
  if (!list_tasks(&work)) goto done;
  nm_for(work.num_tasks, 1, call->threads, run_tasks, &work);
  if (work.partials) nm_for(work.num_tiles, 1, call->threads, merge_tiles, &work);
  result = NM_OK;
done:
  free(work.partials);
  return result;
}
