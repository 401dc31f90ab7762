/* SPDX-License-Identifier: MIT */
/*
 * peer.h - one connection at the daemon's socket: the hand-shake, questions about pools, verbs.
 *
 * A refused peer gets its sentence and then time to read it: closing a socket with unread bytes in
 * it would make the kernel report an error to the peer in place of the sentence. One question has
 * one answer: a peer whose answers do not fit into its socket is hung up on, as is one that leaves
 * LK_PEER_UNREAD descriptors in there, so that nothing is ever queued here. A peer that has gone
 * without reading the descriptors it got keeps its place until it has closed its socket. Nothing
 * blocks but making a channel's memory (milliseconds) and questions to intake (microseconds).
 * Control thread.
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

/* Descriptors that a peer may leave unread. The kernel counts them against the daemon's limit of
 * open files, all peers' together: beyond it nobody could be welcomed any more. */
#define LK_PEER_UNREAD         16u
#define LK_UNREAD_LOOK_SECONDS 1 /* whether a peer that is gone has read them, or closed */

struct lk_server;

/*
 *          accept              hello             hang-up            intake is done
 *     FREE -------> GREETING --------> OPEN -------------> LEAVING ----------------> FREE
 *       \             |                  speaks nonsense: the same
 *        \ not         | bad hello, none in time
 *         \ allowed    v
 *          +------> REFUSED -------> FREE, once the peer hangs up or a second has passed
 *
 * Whoever only asks verbs stays GREETING. In place of FREE comes UNREAD_YET where descriptors lie
 * in the peer's socket, until they do no more.
 */
enum lk_peer_state {
    LK_PEER_FREE,
    LK_PEER_GREETING,
    LK_PEER_OPEN,
    LK_PEER_REFUSED,
    LK_PEER_LEAVING,
    LK_PEER_UNREAD_YET,
};

struct lk_peer {
    enum lk_peer_state state;
    int fd; /* -1: LEAVING, and nothing unread */
    struct lk_identity who;
    uint32_t channel;     /* OPEN, LEAVING: its id */
    uint32_t unread;      /* descriptors sent since it was last seen to have read all */
    uint64_t since_ns;    /* CLOCK_MONOTONIC */
    uint64_t deadline_ns; /* GREETING, REFUSED, UNREAD_YET */
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
