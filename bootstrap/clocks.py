"""How long each layer waits after a stop signal. Nested: each gives the one inside it time to end well.

container (the platform: 5 to 30 s from TERM to KILL) > supervisor > pod loop > run > trainer's last save. The launcher
between run and trainer has a fixed 30 s of its own, so a run does not wait for it to give up. What does not end in time
is killed, and the next start goes on from the newest whole state.
"""

from __future__ import annotations

SUPERVISOR = 28.0  # stopwaitsecs of supervisord.conf; a test holds them equal
POD_LOOP = 26.0
RUN = 24.0
NOTHING_NEW = (
    8.0  # in place of RUN where a launch has finished no step: it may compile for minutes, and nothing is lost
)
LEAVE = 2.0  # in place of POD_LOOP after a second signal
SAVE = 18.0  # a state is saved on TERM only if the last one took less; the rest is for finishing the step
