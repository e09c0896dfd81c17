"""What `appliance up` becomes once all is said: a program of 7 MB that waits for a signal or for supervisord's end.

`up` puts it in its place (exec), so that supervisord stays its child, with the signals below blocked, and it puts
`appliance.cli.ending` in its own. Blocked signals wait meanwhile, so that none is lost between two programs. Run by its
path, without site-packages: it imports nothing of ours.
"""

import os
import signal
import sys

STOPPING = (signal.SIGINT, signal.SIGTERM)
AWAITED = (signal.SIGCHLD, signal.SIGHUP, *STOPPING)


def has_terminal() -> bool:
    """Whether this process has a controlling terminal: one that was closed is nobody's."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def wait(supervisord: int, had_terminal: bool) -> int | None:
    """Wait until it has to end, or has ended by itself: then its exit status. As PID 1 it reaps other processes, too.

    had_terminal: when `up` began; it may have been closed since.
    """
    while (number := signal.sigwait(AWAITED)) not in STOPPING:
        if number == signal.SIGHUP and had_terminal and not has_terminal():
            return None
        while number == signal.SIGCHLD:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == supervisord:
                return os.waitstatus_to_exitcode(status)
            if not child:
                break
    return None


def main() -> None:
    """Arguments: the process id of supervisord; "terminal" or "none", with which `up` began; and the command that ends
    all, which is told supervisord's exit status, if it has one."""
    status = wait(int(sys.argv[1]), sys.argv[2] == "terminal")
    command = sys.argv[3:]
    os.execv(command[0], [*command, *([] if status is None else [str(status)])])


if __name__ == "__main__":
    main()
