// Prefix groups: the keys that many decodes see in the same pages, computed for all of them at once.
//
//   1. a group's tile: the queries of its sequences × the G heads of a KV head = rows, keys [0, B)   → states
//   2. each sequence's own tile: takes its rows' states, goes on from key B
//
// B is the end of the last whole block in the group's pages. A state is what a row's sums are when it gets to B: those
// of the segments before, merged, and those of the segment B lies in. So a row goes through the same blocks in the same
// order as it does alone, and gets the same bits.
#ifndef NIGHTMILL_GROUPS_H
#define NIGHTMILL_GROUPS_H

#include "tile.h"

enum {
  TILES_PER_THREAD = 6,  // a group with fewer tiles is cut further
  FEWEST_ROWS = 4 * STRIP,  // but not below: every tile packs the keys again
};

struct group {
  const int32_t *members;
  int32_t count, keys;  // keys: B
  int64_t state, size;  // in floats: the first state, and the size of one, the G rows of a member and KV head
};

struct place {
  int32_t group, index;  // of a sequence; group -1: in none
  int64_t tile;          // the one of its first KV head
};

static int state_sums(const struct group *group) { return group->keys > SEGMENT && group->keys % SEGMENT ? 2 : 1; }

static struct sums sums_at(float *at, int rows, int dim) {
  return (struct sums){at, at + (int64_t)rows * dim, at + (int64_t)rows * (dim + 1)};
}

static struct sums rows_from(struct sums sums, int row, int dim) {
  return (struct sums){sums.acc + (int64_t)row * dim, sums.m + row, sums.l + (int64_t)row * VW};
}

static void copy_sums(struct sums to, struct sums from, int rows, int dim) {
  memcpy(to.acc, from.acc, sizeof(float) * (size_t)rows * (size_t)dim);
  memcpy(to.m, from.m, sizeof(float) * (size_t)rows);
  memcpy(to.l, from.l, sizeof(float) * (size_t)rows * VW);
}

// The two sums of a tile, in the scratch or in a state.
static void sums_of_state(float *state, int rows, int dim, struct sums out[2]) {
  out[0] = sums_at(state, rows, dim);
  out[1] = sums_at(state + (int64_t)rows * (dim + 1 + VW), rows, dim);
}

static void sums_of_scratch(struct scratch *s, struct sums out[2]) {
  for (int i = 0; i < 2; i++) out[i] = (struct sums){s->acc[i], s->m[i], s->l[i]};
}

static void run_group(const struct nm_attention *call, const struct tile *tile, struct scratch *s,
                      const struct group *group, float *states) {
  const int heads = call->heads / call->kv_heads, rows = tile->count * heads, dim = call->head_dim;
  struct sums mine[2], its[2];
  sums_of_scratch(s, mine);
  load_queries(call, tile, s);
  segment_of(call, tile, s, mine[0], 0);
  for (int segment = 1; segment * SEGMENT < tile->high; segment++) {
    segment_of(call, tile, s, mine[1], segment);
    if ((segment + 1) * SEGMENT <= tile->high) merge(mine[0], mine[1], rows, dim);
  }
  for (int i = 0; i < tile->count; i++) {
    sums_of_state(states + tile->state + i * group->size, heads, dim, its);
    for (int j = 0; j < state_sums(group); j++) copy_sums(its[j], rows_from(mine[j], i * heads, dim), heads, dim);
  }
}

// Sums of a decode's keys [0, end of the segment that `resume` lies in) into total; returns the next segment.
static int resume(const struct nm_attention *call, const struct tile *tile, struct scratch *s, const float *states) {
  const int rows = call->heads / call->kv_heads, dim = call->head_dim, segment = tile->resume / SEGMENT;
  struct sums mine[2], its[2];
  sums_of_scratch(s, mine);
  sums_of_state((float *)states + tile->state, rows, dim, its);
  copy_sums(mine[0], its[0], rows, dim);
  if (tile->resume % SEGMENT == 0) return segment;
  if (segment > 0) copy_sums(mine[1], its[1], rows, dim);
  rest_of_segment(call, tile, s, mine[segment > 0], tile->resume);
  if (segment > 0) merge(mine[0], mine[1], rows, dim);
  return segment + 1;
}

// ---------------------------------------------------------------- planning

static int num_groups(const struct nm_attention *c) { return c->window > 0 ? 0 : c->num_groups; }

// Fills groups [num_groups] and places [S]; returns the floats of all states, or -1 where the groups are not true.
static int64_t list_groups(const struct nm_attention *c, struct group *groups, struct place *places) {
  int64_t floats = 0;
  for (int s = 0; s < c->num_sequences; s++) places[s].group = -1;
  for (int g = 0; g < c->num_groups; g++) {
    const int64_t first = c->group_starts[g], count = c->group_starts[g + 1] - first, pages = c->group_pages[g];
    if (first < 0 || count < 0 || first + count > c->num_members) return -1;
    if (pages < 0 || pages > c->table_width) return -1;
    const int32_t *members = c->group_members + first, *table = NULL;
    for (int i = 0; i < count; i++) {
      const int s = members[i];
      if (s < 0 || s >= c->num_sequences || places[s].group >= 0) return -1;
      if (c->query_starts[s + 1] - c->query_starts[s] != 1 || c->context_lens[s] < pages * c->page_size) return -1;
      const int32_t *own = c->page_tables + (int64_t)s * c->table_width;
      if (table && memcmp(table, own, sizeof(int32_t) * (size_t)pages)) return -1;
      table = own;
      places[s] = (struct place){g, i, 0};
    }
    struct group *group = groups + g;
    *group = (struct group){members, (int32_t)count, (int32_t)(pages * c->page_size / KEYS * KEYS), floats, 0};
    group->size = (int64_t)state_sums(group) * (c->heads / c->kv_heads) * (c->head_dim + 1 + VW);
    if (group->keys > 0) floats += group->size * count * c->kv_heads;
  }
  return floats;
}

static int64_t state_of(const struct group *group, int kv_head, int index) {
  return group->state + ((int64_t)kv_head * group->count + index) * group->size;
}

// Tiles of the groups, KV head by KV head; returns how many. NULL only counts.
static int64_t list_group_tiles(const struct nm_attention *c, const struct group *groups, struct tile *out) {
  const int heads = c->heads / c->kv_heads, most = larger(1, smaller(MAX_ROWS, STATE / c->head_dim) / heads);
  const int wanted = TILES_PER_THREAD * c->threads / (c->kv_heads * larger(1, num_groups(c)));
  int64_t count = 0;
  for (int h = 0; h < c->kv_heads; h++)
    for (int g = 0; g < num_groups(c); g++) {
      const struct group *group = groups + g;
      if (group->keys == 0 || group->count == 0) continue;
      const int pieces = larger((group->count + most - 1) / most, smaller(wanted, group->count * heads / FEWEST_ROWS));
      for (int i = 0, first = 0; i < pieces; i++, count++) {
        const int n = (group->count - first) / (pieces - i);
        if (out)
          out[count] = (struct tile){.sequence = group->members[0], .kv_head = h, .count = n, .high = group->keys,
                                     .group = g, .members = group->members + first,
                                     .state = state_of(group, h, first)};
        first += n;
      }
    }
  return count;
}

#endif
