"""What commands ask of a run's rollout workers: `slipstream recover`, `scale` and `drain`.

    {"ask": "recover", "worker": 0}   restart worker 0, or (null) every one that is out of service
    {"ask": "scale", "rollout": 3}    have three workers
    {"ask": "drain", "worker": 0}     hand worker 0's requests over, and end it

Owns: what these requests mean. Does not own: how they reach the run (control_folder.py), nor how workers come and go
(fleet/scaling.py) or are started again (fleet/supervisor.py).
"""

from slipstream.conf.json_files import JsonObject
from slipstream.fleet.errors import FleetRefusal
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.supervisor import Supervisor


async def carry_out(supervisor: Supervisor, request: JsonObject) -> list[str]:
    """Do what a request asks. Returns what that means, for people.

    Raises:
        SlipstreamError: It cannot be; nothing was done.
    """
    match request["ask"]:
        case "scale":
            return await supervisor.scaling.scale(int(request["rollout"]))
        case "drain":
            return [await supervisor.scaling.drain(_named(supervisor, "rollout-", request["worker"]))]
        case _:
            return await _recover(supervisor, request["worker"])


def _named(supervisor: Supervisor, option: str, worker: int) -> str:
    replicas = supervisor.roster.replicas
    if worker not in range(len(replicas)):
        there = [one.process for one in replicas.values() if one.state is not ReplicaState.gone]
        raise FleetRefusal(f"{option}{worker}: the rollout workers of this run are {', '.join(there)}")
    return list(replicas)[worker]


async def _recover(supervisor: Supervisor, worker: int | None) -> list[str]:
    chosen = supervisor.roster.out_of_service if worker is None else [_named(supervisor, "--worker ", worker)]
    if not chosen:
        starting = [one.process for one in supervisor.roster.replicas.values() if one.state is ReplicaState.starting]
        if starting:
            return [f"{name} is being restarted already" for name in starting]
        return ["no rollout worker is out of service; --worker N restarts one all the same"]
    states = (ReplicaState.serving, ReplicaState.updating)
    in_service = {name for name, replica in supervisor.roster.replicas.items() if replica.state in states}
    lines = [await supervisor.restart_now(name) for name in chosen]
    are_taken = all(supervisor.roster.replicas[name].state is ReplicaState.starting for name in chosen)
    if are_taken and in_service and in_service <= set(chosen):
        lines.append("no other rollout worker serves: sampling stands still until one is back")
    return lines
