/* SPDX-License-Identifier: MIT */
/*
 * wire.h - one message over the channel's SOCK_SEQPACKET socket, with descriptors.
 *
 * Idea: a message is one packet that starts with struct lk_message. Its head is checked here, once,
 * for both sides: magic, stated bytes against received bytes, truncation, number of descriptors.
 *
 * Invariants: a descriptor that was received is either handed to the caller or closed; none leaks
 * on any error. All are close-on-exec. SIGPIPE is never raised.
 * Threads: no state. Blocks as the socket does.
 * What it does not do: no look at the body of a message (validate.h: lk_hello_invalid).
 */
#ifndef LK_WIRE_H
#define LK_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "locks_abi.h"

#define LK_WIRE_FDS_MAX   8
#define LK_WIRE_BYTES_MAX 512 /* the largest message, with room to grow */

/* Fills the head of a message of `bytes`. */
void lk_wire_head(struct lk_message *head, uint16_t type, size_t bytes);

/* Sends head->bytes bytes and count descriptors (which stay the caller's). 0 or -errno: -EAGAIN on
 * a full non-blocking socket, -EPIPE or -ECONNRESET if the other side is gone. */
int lk_wire_send(int socket, const struct lk_message *message, const int *fds, size_t count);

/* Receives one message into at most `room` bytes; bytes beyond a shorter message are zeroed.
 * ret_fds [fds_max] gets descriptors, -1 where there is none; more than fds_max are closed, or not
 * even opened if fds_max is 0, and refused. ret_fds may be NULL with fds_max 0. -> 0; -ECONNRESET:
 * hung up; -EAGAIN: nothing yet (non-blocking or SO_RCVTIMEO); -EPROTO: not a message of this
 * protocol, or -EMFILE: no place for its descriptors, and it is left to be received again,
 * sentence in why; -errno. */
int lk_wire_receive(int socket, struct lk_message *ret, size_t room, int *ret_fds, size_t fds_max,
                    char *why, size_t why_bytes);

#endif
