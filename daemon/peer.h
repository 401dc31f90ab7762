/* SPDX-License-Identifier: MIT */
/*
 * peer.h - one connection at the daemon's socket: the hand-shake, questions about pools, verbs.
 *
 * A refused peer gets its sentence and then time to read it: closing a socket with unread bytes in
 * it would make the kernel report an error to the peer in place of the sentence. One question has
 * one answer: a peer whose answers do not fit into its socket is hung up on, so that nothing is
 * ever queued here. Nothing blocks but making a channel's memory (milliseconds) and questions to
 * intake (microseconds). Control thread.
 */
#ifndef LK_PEER_H
#define LK_PEER_H

#include "../graphs/engine.h"
#include "../shm_protocol/segment.h"
#include "access.h"

#define LK_GREETING_SECONDS 5 /* for a hello or the next verb */
#define LK_REFUSED_SECONDS  1 /* for reading a refusal */

/* Connections beyond limits.max_channels. A flood of one kind leaves room for the others. */
#define LK_PEERS_ASKING  16u /* before their hello, or asking verbs */
#define LK_PEERS_ADMIN   16u /* kept for root and the daemon's user */
#define LK_PEERS_REFUSED 16u /* reading their refusal; further ones are closed at once */
#define LK_PEERS_UID     8u  /* of one user who is no administrator, beyond max_channels_per_uid */

struct lk_server;

/*
 *          accept              hello             hang-up            intake is done
 *     FREE -------> GREETING --------> OPEN -------------> LEAVING ----------------> FREE
 *       \             |                  speaks nonsense: the same
 *        \ not         | bad hello, none in time
 *         \ allowed    v
 *          +------> REFUSED -------> FREE, once the peer hangs up or a second has passed
 *
 * Whoever only asks verbs stays GREETING.
 */
enum lk_peer_state {
    LK_PEER_FREE,
    LK_PEER_GREETING,
    LK_PEER_OPEN,
    LK_PEER_REFUSED,
    LK_PEER_LEAVING,
};

struct lk_peer {
    enum lk_peer_state state;
    int fd; /* -1: LEAVING */
    struct lk_identity who;
    uint32_t channel;     /* OPEN, LEAVING: its id */
    uint64_t since_ns;    /* CLOCK_MONOTONIC */
    uint64_t deadline_ns; /* GREETING, REFUSED */
    char name[LK_NAME_BYTES];
    struct lk_channel_memory memory; /* OPEN, LEAVING */
    struct lk_engine_arena device;   /* likewise; at is NULL: it has none */
};

/* A connection that was accepted; fd is taken over. */
void lk_peer_accept(struct lk_server *server, int fd);
/* The socket is readable or hung up. */
void lk_peer_serve(struct lk_server *server, struct lk_peer *peer);
void lk_peer_expire(struct lk_server *server, struct lk_peer *peer);
/* Ends it from our side, as at a stop. */
void lk_peer_hang_up(struct lk_server *server, struct lk_peer *peer);
/* Intake has let go of its memory. */
void lk_peer_released(struct lk_server *server, struct lk_peer *peer);

#endif
