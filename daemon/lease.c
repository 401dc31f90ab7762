/* SPDX-License-Identifier: MIT */
/*
 * lease.c - marks and tables of leases. See lease.h.
 */
#include "lease.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "assert.h"

/* In planned marks, while the builds of one write are listed: sealed, its build not listed yet. */
#define UNLISTED UINT8_C(0x80)
_Static_assert(LK_PAGE_TOKENS_MAX < 0x80, "a mark leaves its highest bit free");

/* In lk_pool.copied_to, while a list is checked: no batch, a submission. */
#define CHECKED (UINT64_C(1) << 63)

static uint64_t physical(const struct lk_lease *lease, uint64_t page) {
    return (uint64_t)lease->table[page / LK_QUAD_PAGES] * LK_QUAD_PAGES + page % LK_QUAD_PAGES;
}

/* ---- life ---- */

static size_t trial_bytes(const struct lk_lease *lease) {
    return (size_t)lease->pool->view.geometry.layers * lease->pages * sizeof(uint64_t);
}

uint64_t lk_lease_bytes(const struct lk_lease *lease) {
    return trial_bytes(lease) +
           (size_t)LK_LEASE_PLACES * LK_ROWS_MAX * lease->pages * sizeof(uint32_t);
}

static int map_lazily(struct lk_lease *lease) {
    void *at = mmap(NULL, lk_lease_bytes(lease), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return -ENOMEM;
    lease->mapped = lk_lease_bytes(lease);
    lease->trial = at;
    lease->entries = (uint32_t *)((uint8_t *)at + trial_bytes(lease));
    return 0;
}

bool lk_lease_unmap_piece(struct lk_lease *lease) {
    uint64_t left = lease->mapped > LK_LEASE_PIECE_BYTES ? lease->mapped - LK_LEASE_PIECE_BYTES : 0;
    LK_ASSERT(lease->in_flight == 0);
    left -= left % LK_LEASE_PIECE_BYTES; /* whole pages */
    if (lease->mapped)
        munmap((uint8_t *)lease->trial + left, lease->mapped - left);
    lease->mapped = left;
    return left == 0;
}

void lk_lease_unmap(struct lk_lease *lease) {
    if (lease->mapped)
        munmap(lease->trial, lease->mapped);
    lease->mapped = 0;
    lease->trial = NULL;
    lease->entries = NULL;
}

/* `count` of them in a row. */
static void empty_quads(struct lk_pool *pool, uint64_t quad, uint32_t count) {
    size_t pages = (size_t)count * LK_QUAD_PAGES;
    for (uint32_t l = 0; l < pool->view.geometry.layers; l++) {
        memset(pool->marks + lk_pool_page_at(pool, l, quad * LK_QUAD_PAGES), 0, pages);
        memset(pool->ledger.marks + lk_pool_page_at(pool, l, quad * LK_QUAD_PAGES), 0, pages);
        memset(pool->supers + lk_pool_quad_at(pool, l, quad), 0, count);
        memset(pool->ledger.supers + lk_pool_quad_at(pool, l, quad), 0, count);
    }
}

/* Quads of a lease mostly follow each other: emptied one by one, those of a large lease and many
 * layers would hold everybody up. */
static void take_quads(struct lk_lease *lease, uint32_t quads) {
    uint32_t *table = lease->table, first = 0;
    for (uint32_t i = 0; i < quads; i++) {
        table[i] = lk_pool_take(lease->pool, i ? table[i - 1] : LK_LEDGER_NONE);
        if (i && table[i] != table[i - 1] + 1) {
            empty_quads(lease->pool, table[first], i - first);
            first = i;
        }
    }
    empty_quads(lease->pool, table[first], quads - first);
}

int lk_lease_open(struct lk_lease *lease, struct lk_channel *channel, uint64_t pages) {
    uint32_t quads = (uint32_t)((pages + LK_QUAD_PAGES - 1) / LK_QUAD_PAGES);
    lease->pages = pages;
    int rc = map_lazily(lease);
    if (rc)
        return rc;
    take_quads(lease, quads);
    lease->channel = channel;
    lease->slot->channel = channel->open.id;
    lease->slot->uid = channel->open.uid;
    lease->slot->pages = pages;
    lease->slot->quads = quads;
    lk_ledger_set_live(&lease->slot->state);
    lease->next = channel->leases;
    lease->link = &channel->leases;
    if (lease->next)
        lease->next->link = &lease->next;
    channel->leases = lease;
    channel->lease_count++;
    lease->pool->leases++;
    lease->pool->leased_pages += pages;
    lease->batch_serial = lease->unfenced_serial = 0;
    for (uint32_t i = 0; i < LK_LEASE_PLACES; i++) {
        lease->set[i].rows = lease->set[i].in_flight = 0;
        lease->place[i] = i;
    }
    return 0;
}

void lk_lease_close(struct lk_lease *lease) {
    LK_ASSERT(lease->in_flight == 0);
    lk_ledger_set_free(&lease->slot->state);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    for (uint32_t i = 0; i < lease->slot->quads; i++)
        if (lk_pool_drop(lease->pool, lease->table[i]))
            lk_channel_charge(lease->channel, lease->pool, -1);
    lk_lease_unmap(lease);
    *lease->link = lease->next;
    if (lease->next)
        lease->next->link = lease->link;
    lease->channel->lease_count--;
    lease->pool->leases--;
    lease->pool->leased_pages -= lease->pages;
    lease->channel = NULL;
}

/* ---- order in a batch ---- */

bool lk_lease_may(const struct lk_lease *lease, uint64_t serial, enum lk_lease_stage stage,
                  uint32_t layer) {
    bool has_part = lease->batch_serial == serial;
    if (has_part && stage < lease->stage)
        return false;
    if (stage == LK_STAGE_ATTEND)
        return true;
    if (lease->unfenced && lease->unfenced_serial != serial)
        return false;
    if (stage == LK_STAGE_COPY)
        return !has_part;
    return !(has_part && lease->copies_built) && lease->written[layer] != serial;
}

void lk_lease_placed(struct lk_lease *lease, uint64_t serial, enum lk_lease_stage stage,
                     uint32_t layer) {
    if (lease->batch_serial != serial)
        lease->copies_built = false;
    lease->batch_serial = serial;
    lease->stage = stage;
    lease->in_flight++;
    if (stage == LK_STAGE_ATTEND)
        return;
    lease->unfenced++;
    lease->unfenced_serial = serial;
    if (stage == LK_STAGE_WRITE)
        lease->written[layer] = serial;
}

/* ---- tables ---- */

static uint32_t *table_at(const struct lk_lease *lease, uint32_t place, uint32_t row) {
    return lease->entries + ((uint64_t)place * LK_ROWS_MAX + row) * lease->pages;
}

const uint32_t *lk_lease_table(const struct lk_lease *lease, uint32_t set, uint32_t row) {
    return table_at(lease, lease->place[set], row);
}

/* Pages that are scored from summaries: all before the newest. */
static uint64_t complete_pages(const struct lk_lease *lease, uint64_t length) {
    return length ? (length - 1) / lease->pool->view.geometry.page_tokens : 0;
}

static bool is_aligned(const uint32_t *table, uint64_t complete) {
    for (uint64_t j = 0; j + LK_QUAD_PAGES <= complete; j += LK_QUAD_PAGES)
        for (uint32_t i = 0; i < LK_QUAD_PAGES; i++)
            if (table[j] % LK_QUAD_PAGES || table[j + i] != table[j] + i)
                return false;
    return true;
}

enum lk_reason lk_lease_copy_table(struct lk_lease *lease, uint32_t row,
                                   const struct lk_table_desc *desc, const uint8_t *arena,
                                   struct lk_refusal *ret) {
    const uint32_t *ids = (const uint32_t *)(arena + desc->table);
    uint32_t spare = lease->place[LK_TABLE_SETS], *table = table_at(lease, spare, row);
    uint64_t most = lease->pages * lease->pool->view.geometry.page_tokens;
    if (desc->length > most) /* a page would be in it twice */
        return lk_found(ret, LK_REASON_LENGTH_MAX, desc->length, most);
    for (uint32_t i = 0; i < desc->pages; i++) {
        uint32_t id = __atomic_load_n(&ids[i], __ATOMIC_RELAXED);
        if (id >= lease->pages)
            return lk_found(ret, LK_REASON_TABLE_PAGE, id, lease->pages);
        table[i] = (uint32_t)physical(lease, id);
    }
    lease->set[spare].table[row] = (struct lk_lease_table){
        .length = desc->length,
        .pages = desc->pages,
        .aligned = is_aligned(table, complete_pages(lease, desc->length)),
    };
    return LK_REASON_NONE;
}

void lk_lease_replace(struct lk_lease *lease, uint32_t set, uint32_t rows) {
    uint32_t *spare = &lease->place[LK_TABLE_SETS], built = *spare;
    LK_ASSERT(lk_lease_set(lease, set)->in_flight == 0);
    lease->set[built].rows = rows;
    *spare = lease->place[set];
    lease->place[set] = built;
}

/* The client's id of a physical page of the lease. */
static uint64_t id_of(const struct lk_lease *lease, uint32_t page) {
    uint64_t i = 0;
    while (lease->table[i] != page / LK_QUAD_PAGES)
        i++;
    return i * LK_QUAD_PAGES + page % LK_QUAD_PAGES;
}

enum lk_reason lk_lease_unfit(const struct lk_lease *lease, const struct lk_row_desc *desc,
                              struct lk_refusal *ret) {
    uint32_t rows = lease->set[lease->place[desc->table_set]].rows;
    uint32_t page_tokens = lease->pool->view.geometry.page_tokens;
    if (desc->table_row >= rows)
        return lk_found(ret, LK_REASON_TABLE_ROW, desc->table_row, rows);
    uint64_t length = lk_lease_row(lease, desc)->length;
    if (desc->tokens > length && desc->tokens > 1) /* one query may see nothing */
        return lk_found(ret, LK_REASON_TABLE_TOKENS, desc->tokens, length);
    if (length == 0)
        return LK_REASON_NONE;
    const uint32_t *table = lk_lease_table(lease, desc->table_set, desc->table_row);
    const uint8_t *marks = lease->pool->marks + lk_pool_page_at(lease->pool, desc->layer, 0);
    uint64_t complete = complete_pages(lease, length);
    for (uint64_t j = 0; j < complete; j++)
        if (marks[table[j]] != page_tokens)
            return lk_found(ret, LK_REASON_TABLE_UNSEALED, id_of(lease, table[j]), marks[table[j]]);
    if (marks[table[complete]] < length - complete * page_tokens)
        return lk_found(ret, LK_REASON_TABLE_GAP, id_of(lease, table[complete]),
                        marks[table[complete]]);
    return LK_REASON_NONE;
}

bool lk_lease_has_supers(const struct lk_lease *lease, const struct lk_row_desc *desc) {
    const struct lk_lease_table *t = lk_lease_row(lease, desc);
    const uint32_t *table = lk_lease_table(lease, desc->table_set, desc->table_row);
    uint64_t complete = complete_pages(lease, t->length);
    for (uint64_t j = 0; t->aligned && j + LK_QUAD_PAGES <= complete; j += LK_QUAD_PAGES)
        if (!lease->pool
                 ->supers[lk_pool_quad_at(lease->pool, desc->layer, table[j] / LK_QUAD_PAGES)])
            return false;
    return t->aligned;
}

/* ---- writes ---- */

/* A slot of the client's -> of the lease; UINT64_MAX: none. */
static enum lk_reason read_slot(const struct lk_lease *lease, const int64_t *client, uint64_t *ret,
                                struct lk_refusal *ret_refusal) {
    uint64_t slots = lease->pages * lease->pool->view.geometry.page_tokens;
    int64_t slot = __atomic_load_n(client, __ATOMIC_RELAXED);
    *ret = slot < 0 ? UINT64_MAX : (uint64_t)slot;
    return slot >= 0 && *ret >= slots ? lk_found(ret_refusal, LK_REASON_SLOT, *ret, slots)
                                      : LK_REASON_NONE;
}

enum lk_reason lk_lease_write_invalid(struct lk_lease *lease, uint64_t serial, uint32_t layer,
                                      const int64_t *client, uint32_t tokens,
                                      struct lk_refusal *ret) {
    const struct lk_pool *pool = lease->pool;
    uint32_t page_tokens = pool->view.geometry.page_tokens;
    uint64_t slot, *trial = lease->trial + layer * lease->pages;
    for (uint32_t i = 0; i < tokens; i++) {
        enum lk_reason reason = read_slot(lease, &client[i], &slot, ret);
        if (reason)
            return reason;
        if (slot == UINT64_MAX)
            continue;
        uint64_t page = slot / page_tokens, offset = slot % page_tokens;
        uint64_t mark = trial[page] >> 8 == serial
                            ? trial[page] & 0xff
                            : pool->marks[lk_pool_page_at(pool, layer, physical(lease, page))];
        if (offset > mark)
            return lk_found(ret, LK_REASON_SLOT_GAP, offset, mark);
        trial[page] = serial << 8 | (offset + 1);
    }
    return LK_REASON_NONE;
}

static enum lk_reason read_slots(const struct lk_lease *lease, const int64_t *client,
                                 uint32_t tokens, uint64_t *ret_slots, struct lk_refusal *ret) {
    uint32_t page_tokens = lease->pool->view.geometry.page_tokens;
    uint64_t slot;
    for (uint32_t i = 0; i < tokens; i++) {
        enum lk_reason reason = read_slot(lease, &client[i], &slot, ret);
        if (reason)
            return reason;
        ret_slots[i] = slot == UINT64_MAX
                           ? UINT64_MAX
                           : physical(lease, slot / page_tokens) * page_tokens + slot % page_tokens;
    }
    return LK_REASON_NONE;
}

/* Planned marks as after the write; a gap undoes them. */
static enum lk_reason plan_write(struct lk_pool *pool, uint32_t layer, const uint64_t *slots,
                                 uint32_t tokens, struct lk_lease_undo *undo,
                                 struct lk_refusal *ret) {
    uint32_t page_tokens = pool->view.geometry.page_tokens, changed = 0;
    for (uint32_t i = 0; i < tokens; i++) {
        if (slots[i] == UINT64_MAX)
            continue;
        uint64_t at = lk_pool_page_at(pool, layer, slots[i] / page_tokens);
        uint8_t offset = (uint8_t)(slots[i] % page_tokens), mark = pool->marks[at];
        if (offset > mark) {
            while (changed--)
                pool->marks[undo[changed].at] = undo[changed].mark;
            return lk_found(ret, LK_REASON_SLOT_GAP, offset, mark);
        }
        undo[changed++] = (struct lk_lease_undo){at, mark};
        pool->marks[at] = offset + 1;
    }
    return LK_REASON_NONE;
}

static void lower(struct lk_pool *pool, uint32_t layer, const uint64_t *slots, uint32_t tokens) {
    uint32_t page_tokens = pool->view.geometry.page_tokens;
    for (uint32_t i = 0; i < tokens; i++) {
        if (slots[i] == UINT64_MAX)
            continue;
        uint64_t page = slots[i] / page_tokens, quad = page / LK_QUAD_PAGES;
        uint8_t offset = (uint8_t)(slots[i] % page_tokens);
        uint8_t *mark = &pool->ledger.marks[lk_pool_page_at(pool, layer, page)];
        *mark = offset < *mark ? offset : *mark;
        pool->supers[lk_pool_quad_at(pool, layer, quad)] = 0;
        pool->ledger.supers[lk_pool_quad_at(pool, layer, quad)] = 0;
    }
}

enum lk_reason lk_lease_write(struct lk_lease *lease, uint32_t layer, const int64_t *client,
                              uint32_t tokens, uint64_t *ret_slots, struct lk_lease_undo *undo,
                              struct lk_refusal *ret) {
    enum lk_reason reason = read_slots(lease, client, tokens, ret_slots, ret);
    if (!reason)
        reason = plan_write(lease->pool, layer, ret_slots, tokens, undo, ret);
    if (!reason)
        lower(lease->pool, layer, ret_slots, tokens);
    return reason;
}

/* The planned marks of a quad at a layer. */
static bool all_sealed(const struct lk_pool *pool, uint32_t layer, uint64_t quad) {
    const uint8_t *marks = pool->marks + lk_pool_page_at(pool, layer, quad * LK_QUAD_PAGES);
    for (uint32_t i = 0; i < LK_QUAD_PAGES; i++)
        if (marks[i] != pool->view.geometry.page_tokens)
            return false;
    return true;
}

/* Twice over the slots: which pages are sealed now, then each once, the last of a quad with it. */
uint32_t lk_lease_builds(struct lk_lease *lease, uint32_t layer, const uint64_t *slots,
                         uint32_t tokens, struct lk_build *builds) {
    struct lk_pool *pool = lease->pool;
    uint32_t page_tokens = pool->view.geometry.page_tokens, count = 0;
    for (uint32_t i = 0; i < tokens; i++) {
        if (slots[i] == UINT64_MAX)
            continue;
        uint8_t *mark = &pool->marks[lk_pool_page_at(pool, layer, slots[i] / page_tokens)];
        if (*mark == page_tokens)
            *mark |= UNLISTED;
    }
    for (uint32_t i = 0; i < tokens; i++) {
        if (slots[i] == UINT64_MAX)
            continue;
        uint64_t page = slots[i] / page_tokens, quad = page / LK_QUAD_PAGES;
        uint8_t *mark = &pool->marks[lk_pool_page_at(pool, layer, page)];
        if (!(*mark & UNLISTED))
            continue;
        *mark &= (uint8_t)~UNLISTED;
        uint32_t full = all_sealed(pool, layer, quad);
        if (full)
            pool->supers[lk_pool_quad_at(pool, layer, quad)] = 1;
        builds[count++] =
            (struct lk_build){.pool = &pool->view, .layer = layer, .quad = full, .page = page};
    }
    return count;
}

static void raise_page(struct lk_pool *pool, uint32_t layer, uint64_t page) {
    uint64_t at = lk_pool_page_at(pool, layer, page);
    uint64_t quad = lk_pool_quad_at(pool, layer, page / LK_QUAD_PAGES);
    pool->ledger.marks[at] = pool->marks[at];
    pool->ledger.supers[quad] = pool->supers[quad];
}

void lk_lease_written(struct lk_pool *pool, const struct lk_write *write) {
    for (uint32_t i = 0; i < write->tokens; i++)
        if (write->slots[i] != UINT64_MAX)
            raise_page(pool, write->layer, write->slots[i] / pool->view.geometry.page_tokens);
}

/* ---- lists ---- */

enum lk_reason lk_lease_pair_invalid(const struct lk_lease *lease, struct lk_pair pair,
                                     struct lk_refusal *ret) {
    uint32_t high = pair.from > pair.to ? pair.from : pair.to;
    if (high >= lease->pages)
        return lk_found(ret, LK_REASON_TABLE_PAGE, high, lease->pages);
    if (pair.from == pair.to)
        return lk_found(ret, LK_REASON_COPY_SELF, pair.to, 0);
    return LK_REASON_NONE;
}

enum lk_reason lk_lease_copy_invalid(struct lk_lease *lease, uint64_t serial, struct lk_pair pair,
                                     struct lk_refusal *ret) {
    enum lk_reason reason = lk_lease_pair_invalid(lease, pair, ret);
    if (reason)
        return reason;
    uint64_t *mark = &lease->pool->copied_to[physical(lease, pair.to)];
    if (*mark == (serial | CHECKED))
        return lk_found(ret, LK_REASON_COPY_SELF, pair.to, 0);
    *mark = serial | CHECKED;
    return LK_REASON_NONE;
}

/* Copies of a batch run side by side: none may read or write what another writes. */
bool lk_lease_may_copy(const struct lk_lease *lease, uint64_t serial, struct lk_pair pair) {
    const struct lk_pool *pool = lease->pool;
    uint64_t source = physical(lease, pair.from), target = physical(lease, pair.to);
    return pool->copied_to[source] != serial && pool->copied_to[target] != serial &&
           pool->copied_from[target] != serial;
}

uint32_t lk_lease_copy(struct lk_lease *lease, uint64_t serial, struct lk_pair pair,
                       struct lk_copy *copies) {
    struct lk_pool *pool = lease->pool;
    uint64_t source = physical(lease, pair.from), target = physical(lease, pair.to);
    uint32_t count = 0;
    pool->copied_from[source] = pool->copied_to[target] = serial;
    for (uint32_t l = 0; l < pool->view.geometry.layers; l++) {
        uint64_t at = lk_pool_page_at(pool, l, target);
        uint64_t quad = lk_pool_quad_at(pool, l, target / LK_QUAD_PAGES);
        pool->marks[at] = pool->marks[lk_pool_page_at(pool, l, source)];
        pool->ledger.marks[at] = 0;
        pool->supers[quad] = pool->ledger.supers[quad] = 0;
        if (pool->marks[at])
            copies[count++] =
                (struct lk_copy){.pool = &pool->view, .layer = l, .from = source, .to = target};
    }
    return count;
}

uint32_t lk_lease_copy_builds(struct lk_lease *lease, const struct lk_copy *copies, uint32_t count,
                              struct lk_build *builds) {
    struct lk_pool *pool = lease->pool;
    uint32_t built = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t quad = copies[i].to / LK_QUAD_PAGES;
        uint8_t *super = &pool->supers[lk_pool_quad_at(pool, copies[i].layer, quad)];
        if (*super || !all_sealed(pool, copies[i].layer, quad))
            continue;
        *super = 1;
        builds[built++] = (struct lk_build){
            .pool = &pool->view, .layer = copies[i].layer, .quad = 1, .page = copies[i].to};
    }
    lease->copies_built |= built > 0;
    return built;
}

void lk_lease_copied(struct lk_pool *pool, const struct lk_copy *copy) {
    raise_page(pool, copy->layer, copy->to);
}

void lk_lease_invalidate(struct lk_lease *lease, uint32_t page) {
    struct lk_pool *pool = lease->pool;
    uint64_t target = physical(lease, page);
    for (uint32_t l = 0; l < pool->view.geometry.layers; l++) {
        uint64_t at = lk_pool_page_at(pool, l, target);
        uint64_t quad = lk_pool_quad_at(pool, l, target / LK_QUAD_PAGES);
        pool->marks[at] = pool->ledger.marks[at] = 0;
        pool->supers[quad] = pool->ledger.supers[quad] = 0;
    }
}
