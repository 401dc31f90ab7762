/* SPDX-License-Identifier: MIT */
/*
 * reason.c - a name, an errno and a sentence for every reason of validate.h.
 *
 * A sentence is a template: {value} and {limit} are unsigned, {signed} and {float} are the value
 * read as such, {handle} is the value in hexadecimal. A noun behind the name agrees with the
 * number: {value pages} is "1 page", "2 pages". The row at fault is put in front of it.
 */
#include "validate.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

struct reason {
    const char *name;
    int error;
    const char *text;
};

#define AREA(code, name, what)                                                                     \
    [LK_REASON_##code##_RANGE] = {name "_range", EINVAL,                                           \
                                  what " at arena offset {value} reach beyond the arena of "       \
                                       "{limit bytes}"},                                           \
    [LK_REASON_##code##_ALIGN] = {                                                                 \
        name "_align", EINVAL, what " at arena offset {value} are not aligned to {limit bytes}"}

#define DEVICE_AREA(code, name, what)                                                              \
    [LK_REASON_##code##_DEVICE] = {name "_device", EINVAL,                                         \
                                   what " at device arena offset {value} reach beyond the device " \
                                        "arena of {limit bytes}"}

static const struct reason reasons[LK_REASONS] = {
    [LK_REASON_NONE] = {"none", 0, "nothing is wrong"},
    [LK_REASON_OP] = {"op", EINVAL, "operation {value} is unknown, operations are 1 to {limit}"},
    [LK_REASON_RESERVED] = {"reserved", EINVAL, "a reserved field is {value}, not 0"},
    [LK_REASON_DESC_OFFSET] = {"desc_offset", EINVAL,
                               "descriptor offset {value} is not a multiple of {limit}"},
    [LK_REASON_DESC_RANGE] = {"desc_range", EINVAL,
                              "the descriptor at offset {value} reaches beyond the area of "
                              "{limit bytes}"},
    [LK_REASON_DESC_BYTES] = {"desc_bytes", EINVAL,
                              "the descriptor has {value bytes}, this operation needs {limit}"},
    [LK_REASON_POOL] = {"pool", ESRCH, "pool {value} does not exist, there are {limit}"},
    [LK_REASON_ROWS] = {"rows", EINVAL, "a submission of {value rows}, it may have {limit}"},
    [LK_REASON_BUDGET] = {"budget", EINVAL,
                          "a budget of {value tokens} is smaller than a page, {limit tokens}"},
    [LK_REASON_SAMPLED] = {"sampled", EINVAL,
                           "{signed} sampled pages are asked for, it must be -1 (default) or more"},
    [LK_REASON_MASS_TARGET] = {"mass_target", EINVAL,
                               "mass_target {float} is not between 0 (none) and {limit}"},
    [LK_REASON_SM_SCALE] = {"sm_scale", EINVAL, "sm_scale {float} is not a finite number"},
    [LK_REASON_SCAN] = {"scan", EINVAL, "scan mode {value} is unknown, modes are 0 to {limit}"},
    [LK_REASON_SINK_PAGES] = {"sink_pages", EINVAL, "{value} sink pages are more than {limit}"},
    [LK_REASON_RECENT_PAGES] = {"recent_pages", EINVAL,
                                "{value} recent pages are not between 1 (the newest) and {limit}"},
    [LK_REASON_LAYER] = {"layer", EINVAL, "layer {value} does not exist, the pool has {limit}"},
    [LK_REASON_TOKENS_ZERO] = {"tokens_zero", EINVAL,
                               "{value tokens} in a row, it must have {limit} or more"},
    [LK_REASON_TOKENS_MANY] = {"tokens_many", EINVAL,
                               "{value tokens} in a row, it may have {limit}"},
    [LK_REASON_TOKENS_ONE] = {"tokens_one", EINVAL,
                              "{value tokens} in a row that appends nothing, it must have {limit}"},
    [LK_REASON_TABLE_POSITION] =
        {"table_position", EINVAL,
         "position {value} in a row that names a table, it must be {limit}"},
    [LK_REASON_TABLE_SET] = {"table_set", EINVAL,
                             "table set {value} does not exist, a lease has {limit}"},
    [LK_REASON_LIST_PAGES] =
        {"list_pages", EINVAL,
         "a page list with room for {value pages}, it must have {limit} or more"},
    [LK_REASON_HANDLE_NONE] = {"handle_none", EINVAL, "handle {value} names nothing"},
    AREA(Q, "q", "queries"),
    AREA(K, "k", "keys"),
    AREA(V, "v", "values"),
    AREA(OUT, "out", "outputs"),
    AREA(LSE, "lse", "log-sum-exps"),
    AREA(LIST, "list", "list entries"),
    AREA(SLOTS, "slots", "slots"),
    AREA(RESULTS, "results", "results"),
    AREA(TIMING, "timing", "times"),
    AREA(TABLE, "table", "page ids"),
    [LK_REASON_LEASE_EMPTY] = {"lease_empty", EINVAL,
                               "a lease of {value pages}, it must have {limit} or more"},
    [LK_REASON_COUNT] = {"count", EINVAL, "a list of {value entries} is longer than {limit}"},
    [LK_REASON_TABLE_LENGTH] = {"table_length", EINVAL,
                                "a table of {value pages}, its length takes {limit}"},
    [LK_REASON_TABLE_PAGE] = {"table_page", EINVAL,
                              "page {value} is outside the lease of {limit pages}"},
    [LK_REASON_TABLE_ROW] = {"table_row", EINVAL,
                             "table {value} does not exist, the set has {limit}"},
    [LK_REASON_TABLE_TOKENS] = {"table_tokens", EINVAL,
                                "{value queries} in a row whose table has {limit tokens}"},
    [LK_REASON_TABLE_UNSEALED] = {"table_unsealed", EINVAL,
                                  "page {value} is before the newest of its table and holds only "
                                  "{limit tokens}"},
    [LK_REASON_TABLE_GAP] =
        {"table_gap", EINVAL,
         "page {value} holds only {limit tokens}, the length of its table takes "
         "more"},
    [LK_REASON_SLOT] = {"slot", EINVAL, "slot {signed} is outside the lease of {limit slots}"},
    [LK_REASON_SLOT_GAP] = {"slot_gap", EINVAL,
                            "offset {value} of a page is written while the page holds "
                            "{limit tokens}: a gap"},
    [LK_REASON_COPY_SELF] = {"copy_self", EINVAL,
                             "page {value} is copied to itself, or is the end of two copies"},
    [LK_REASON_HANDLE_STALE] = {"handle_stale", ESTALE,
                                "handle {handle} names nothing of this connection: freed, or never "
                                "made"},
    [LK_REASON_HANDLE_KIND] = {"handle_kind", EINVAL,
                               "handle {handle} is not of the kind (sequence, lease) that this "
                               "operation takes"},
    [LK_REASON_HANDLE_POOL] = {"handle_pool", EINVAL,
                               "the handle belongs to pool {value}, the submission names pool "
                               "{limit}"},
    [LK_REASON_POSITION] = {"position", EINVAL,
                            "position {value} is not the layer's length, {limit}"},
    [LK_REASON_REPLAYED] = {"replayed", EALREADY,
                            "position {value} was done before, the layer's length is {limit}"},
    [LK_REASON_LENGTH_MAX] =
        {"length_max", ENOSPC,
         "a length of {value tokens} is more than the sequence or table may have, {limit}"},
    [LK_REASON_TRUNCATE] = {"truncate", EINVAL,
                            "cannot cut to {value tokens}, the longest layer has {limit}"},
    [LK_REASON_SEQUENCES_QUOTA] = {"sequences_quota", EDQUOT,
                                   "this would be sequence {value} of the connection, it may have "
                                   "{limit}"},
    [LK_REASON_SEQUENCES_POOL] =
        {"sequences_pool", ENOSPC,
         "this would be sequence {value} of the pool, it may have {limit}"},
    [LK_REASON_LEASES_QUOTA] =
        {"leases_quota", EDQUOT,
         "this would be lease {value} of the connection, it may have {limit}"},
    [LK_REASON_PAGES_QUOTA] = {"pages_quota", EDQUOT,
                               "the connection would hold {value pages}, it may hold {limit}"},
    [LK_REASON_PAGES_UID] = {"pages_uid", EDQUOT,
                             "the user's connections would hold {value pages}, they may hold "
                             "{limit}"},
    [LK_REASON_PAGES_FREE] = {"pages_free", ENOSPC,
                              "this takes {value pages}, the pool has {limit} free"},
    [LK_REASON_WORKSPACE] = {"workspace", EINVAL,
                             "the row takes {value bytes} of workspace, the daemon has {limit}"},
    [LK_REASON_DRAINING] = {"draining", ESHUTDOWN, "the daemon drains and takes nothing new"},
    [LK_REASON_CLOSING] = {"closing", ECONNRESET, "the connection is being closed"},
    [LK_REASON_MEMORY] =
        {"memory", ENOMEM,
         "the daemon gets no {value bytes} of address space for the lease's tables "
         "(ulimit -v, vm.overcommit_memory): try one of fewer pages"},
    [LK_REASON_BUDGET_DEVICE] = {"budget_device", EINVAL,
                                 "a budget of {value tokens} is more than this device selects "
                                 "from, {limit}"},
    [LK_REASON_LENGTH_DEVICE] = {"length_device", EINVAL,
                                 "a row of {value tokens} is longer than this device scores, "
                                 "{limit}"},
    DEVICE_AREA(Q, "q", "queries"),
    DEVICE_AREA(K, "k", "keys"),
    DEVICE_AREA(V, "v", "values"),
    DEVICE_AREA(OUT, "out", "outputs"),
    DEVICE_AREA(LSE, "lse", "log-sum-exps"),
    [LK_REASON_DEVICE_PAYLOAD] = {"device_payload", EINVAL,
                                  "payload at device arena offset {value} lies among the fences, "
                                  "which end at {limit}"},
    [LK_REASON_FENCE_NONE] = {"fence_none", EINVAL,
                              "fence number {value} does not exist, the connection has {limit} (a "
                              "device arena brings them)"},
    [LK_REASON_FENCE] = {"fence", ETIMEDOUT,
                         "the fence held {value} when its time was over, {limit} was waited for"},
    [LK_REASON_ROW_REPEATS] = {"row_repeats", EINVAL,
                               "position {value} repeats what row {limit} of the same submission "
                               "appends"},
    [LK_REASON_LEASES_POOL] = {"leases_pool", EDQUOT,
                               "this would be lease {value} of the pool, it may have {limit}"},
    [LK_REASON_TABLE_MEMORY] = {"table_memory", ENOMEM,
                                "the machine has no memory left for {value bytes} of a table: "
                                "close leases, or fill fewer sets and rows"},
};

static const struct reason *lookup(uint16_t reason) {
    return reason < LK_REASONS && reasons[reason].name ? &reasons[reason] : NULL;
}

int lk_reason_errno(uint16_t reason) {
    const struct reason *r = lookup(reason);
    return r ? -r->error : -EINVAL;
}

const char *lk_reason_name(uint16_t reason) {
    const struct reason *r = lookup(reason);
    return r ? r->name : "unknown";
}

/* The noun of a placeholder, up to its brace: in the singular for one. */
static void add_noun(const char *noun, bool one, char *out, size_t bytes) {
    size_t length = strcspn(noun, "}");
    bool ies = length > 3 && memcmp(noun + length - 3, "ies", 3) == 0;
    size_t kept = one ? length - (ies ? 3 : 1) : length;
    snprintf(out, bytes, " %.*s%s", (int)kept, noun, one && ies ? "y" : "");
}

/* The text of one placeholder, which starts at *in behind its brace. */
static void expand(const char *in, uint64_t value, uint64_t limit, char *out, size_t bytes) {
    float f;
    uint32_t bits = (uint32_t)value;
    memcpy(&f, &bits, sizeof(f));
    if (in[0] == 'v')
        snprintf(out, bytes, "%" PRIu64, value);
    else if (in[0] == 'l')
        snprintf(out, bytes, "%" PRIu64, limit);
    else if (in[0] == 's')
        snprintf(out, bytes, "%" PRId64, (int64_t)value);
    else if (in[0] == 'f')
        snprintf(out, bytes, "%g", (double)f);
    else
        snprintf(out, bytes, "0x%" PRIx64, value);
    size_t at = strlen(out), name = strcspn(in, " }");
    if (in[name] == ' ')
        add_noun(in + name + 1, (in[0] == 'l' ? limit : value) == 1, out + at, bytes - at);
}

char *lk_reason_text(uint16_t reason, uint64_t value, uint64_t limit, uint32_t row, char *text,
                     size_t bytes) {
    const struct reason *r = lookup(reason);
    const char *in = r ? r->text
                       : "refused for a reason this side does not know, value {value}, "
                         "limit {limit}";
    size_t at = 0;
    if (bytes == 0)
        return text;
    text[0] = '\0';
    if (row != LK_ROW_WHOLE)
        at = (size_t)snprintf(text, bytes, "row %u: ", row);
    while (*in && at + 1 < bytes) {
        if (*in == '{') {
            expand(in + 1, value, limit, text + at, bytes - at);
            at += strlen(text + at);
            in = strchr(in, '}') + 1;
        } else {
            text[at++] = *in++;
            text[at] = '\0';
        }
    }
    return text;
}
