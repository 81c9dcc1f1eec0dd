"""The table of rules: the name in a policy file, and the class whose fields are the keys there."""

from __future__ import annotations

from gpuguard.policies import Rule
from gpuguard.policies.age import Age
from gpuguard.policies.command import Command
from gpuguard.policies.expression import Expression
from gpuguard.policies.forecast import Forecast
from gpuguard.policies.health import Health
from gpuguard.policies.idle import Idle
from gpuguard.policies.memory import Memory
from gpuguard.policies.memory_growth import MemoryGrowth
from gpuguard.policies.outside_scheduler import OutsideScheduler
from gpuguard.policies.power import Power
from gpuguard.policies.processes import Processes
from gpuguard.policies.quota import Quota
from gpuguard.policies.temperature import Temperature
from gpuguard.policies.trespass import Trespass
from gpuguard.policies.unclaimed import Unclaimed
from gpuguard.policies.users import Users
from gpuguard.policies.utilization import Utilization

RULES: dict[str, type[Rule]] = {
    "memory": Memory,
    "memory_growth": MemoryGrowth,
    "temperature": Temperature,
    "power": Power,
    "utilization": Utilization,
    "idle": Idle,
    "processes": Processes,
    "forecast": Forecast,
    "unclaimed": Unclaimed,
    "trespass": Trespass,
    "users": Users,
    "quota": Quota,
    "age": Age,
    "health": Health,
    "command": Command,
    "outside_scheduler": OutsideScheduler,
    "expression": Expression,
}
