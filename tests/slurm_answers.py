"""What `scontrol` answers on the node n1, for tests."""

from __future__ import annotations

import threading

# As Slurm 22.05.8 prints them; fields that nobody reads are left out.
NODE = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=16  CPUAlloc=1 AvailableFeatures=(null) ActiveFeatures=(null) "
    "Gres={gres} NodeAddr=127.0.0.1 NodeHostName=n1 Version=22.05.8 OS=Linux 6.1 #1 SMP @0  RealMemory=1000 "
    "State={state} ThreadsPerCore=1 Partitions=p  CfgTRES=cpu=16,mem=1000M,billing=16,gres/gpu=4"
)
JOB = (
    "JobId={id} JobName={name} UserId={user}({uid}) GroupId=lab(100) MCS_label=N/A Priority=1 JobState={state} "
    "Reason=None Partition=p ReqNodeList=(null) ExcNodeList=(null) NodeList={nodes} BatchHost=n1 NumNodes=1 NumCPUs=1 "
    "TRES=cpu=1,node=1,billing=1 Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* JOB_GRES=gpu:1   "
    "{details} MinCPUsNode=1 Command=/home/train.sh WorkDir=/home StdOut=/dev/null Power= TresPerNode=gres:gpu:1 "
)
DETAIL = "Nodes={nodes} CPU_IDs=0-1 Mem=0 GRES={gres}"
ALICE, BOB, EVE = 1001, 1002, 1003


def a_job(
    gres: str | None = "gpu:1(IDX:0)", *, uid: int = ALICE, state: str = "RUNNING", nodes: str = "n1", name: str = "x"
) -> str:
    details = "" if gres is None else DETAIL.format(nodes=nodes, gres=gres)
    return JOB.format(id=7, name=name, user="somebody", uid=uid, state=state, nodes=nodes, details=details)


class Controller:
    """Answers as scontrol does; counts."""

    def __init__(self, *jobs: str, gpus: int = 4) -> None:
        self.jobs, self.gpus, self.asked = list(jobs), gpus, 0
        self.private: str | None = "none"
        self.answers, self.free = True, threading.Event()
        self.free.set()

    def __call__(self, *words: str) -> str | None:
        self.asked += 1
        assert self.free.wait(20)
        if not self.answers:
            return None
        if words[:2] == ("show", "node"):
            return NODE.format(gres=f"gpu:{self.gpus}", state="MIXED")
        if words == ("show", "config"):
            return (
                self.private
                and f"Configuration data\nPreemptMode = OFF\nPrivateData             = {self.private}\nA = x\n"
            )
        assert words == ("show", "job", "-a", "-d", "-o")
        return "\n".join(self.jobs)
