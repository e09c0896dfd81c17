"""Desired state -> the include file of supervisord: one group per instance, one program per replica.

Supervisor's parser has four traps for a value that a person chooses (supervisor 4.3.0): ``%`` is expanded;
``%(here)s`` is expanded even with a doubled percent sign; a ``;`` or ``#`` after white space cuts off the rest of the
line, even inside quotes; and the command is split like a shell line. `command_line` escapes all four, and
`core.settings` refuses paths with them. tests/export parses hostile values back with supervisor's own ServerOptions.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from appliance.core.layout import CLUSTER, EXPRESS
from appliance.core.models import Job
from appliance.core.program import Program, cluster_program, express_program, job_program, programs_of
from appliance.core.settings import Settings
from appliance.core.state import Instance, State

# Priorities of groups. Calls in work end before the replicas that they need (`etc/supervisord.conf`: control 10,
# multiplexer 20, gateway 30, monitor 40), as with `appliance down`.
INSTANCES, OTHERS = 15, 999
HEADER = "; Written by tei-appliance from its state file. Edits here are overwritten; use the REST API or the CLI.\n"


def instances_conf(state: State, settings: Settings, python: str, node_id: str, jobs: Sequence[Job] = ()) -> str:
    """The whole include file. The same state gives the same bytes, so that no program is restarted without need."""
    # On the head of a cluster Ray runs the instances, and with the directory of others they are elsewhere.
    own = state.instances.values() if settings.has_state_directory and not settings.is_cluster_head else ()
    groups = [instance_conf(instance, settings, python, node_id) for instance in own]
    if settings.ray_role:
        groups.append(group(CLUSTER, [cluster_program(settings, python, node_id)]))
    if any(instance.spec.express for instance in own):
        groups.append(group(EXPRESS, [express_program(settings, python, node_id)]))
    groups += [group(job.program, [job_program(job, settings, python, node_id)]) for job in jobs]
    return "\n".join([HEADER, *groups])


def instance_conf(instance: Instance, settings: Settings, python: str, node_id: str) -> str:
    """The group of one instance, with all its generations, as it stands in the include file."""
    # In an order that does not depend on which of them is called: supervisord compares members in their order.
    generations = sorted(instance.generations, key=lambda each: each.series)
    programs = [each for one in generations for each in programs_of(one, settings, python, node_id)]
    return group(instance.name, programs, INSTANCES)


def group(name: str, programs: Sequence[Program], priority: int = OTHERS) -> str:
    """priority: a supervisord that shuts down ends the groups with the highest first."""
    members = ",".join(program.name for program in programs)
    head = [f"[group:{name}]", f"programs={members}", f"priority={priority}", ""]
    return "\n".join([*head, *(section(program) for program in programs)])


def section(program: Program) -> str:
    variables = ",".join(f'{key}="{value}"' for key, value in program.environment.items())
    return f"""[program:{program.name}]
command={command_line(program.argv)}
environment={percent(variables)}
autostart={str(program.autostart).lower()}
autorestart={program.autorestart}
startsecs={program.start_secs}
startretries={program.start_retries}
stopsignal=TERM
stopwaitsecs={program.stop_wait_secs}
stopasgroup={str(program.stop_as_group).lower()}
killasgroup=true
redirect_stderr=true
stdout_logfile={percent(program.log_file)}
stdout_logfile_maxbytes={program.log_bytes}
stdout_logfile_backups={program.log_backups}
"""


def command_line(argv: Sequence[str]) -> str:
    """One line that supervisor's parser and `shlex.split` turn back into ``argv``."""
    line = " ".join(shlex.quote(argument) for argument in argv)
    # An empty quoted string between a blank and the comment character means nothing to shlex, and hides the comment
    # from the parser. The blank is always inside single quotes: shlex.quote quotes such arguments.
    line = re.sub(r"(?<=\s)([;#])", r"''\1", line)
    # Before anything is expanded, `%(here)s` is replaced as plain text, even with a doubled percent sign.
    return percent(line.replace("%(here)s", "%''(here)s"))


def percent(value: str) -> str:
    return value.replace("%", "%%")
