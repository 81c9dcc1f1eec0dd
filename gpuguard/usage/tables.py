"""The tables of the usage store: their names, and how little room a number takes in them.

Three resolutions of each kind, `devices_900s` for slots of 900 s; a slot's number is unix time // its width.  The rows
of 400 days have to fit into 40 MB, so a row has one key for its slot and for whom it is about, and time is kept in
ticks: 900 s of them fit into two bytes, where milliseconds take three.  Columns are named as in tally for whoever
reads.  Does not read or write: see questions and storefile.
"""

from __future__ import annotations

from gpuguard.usage.tally import DEVICE_COLUMNS, WAITING_COLUMNS, WIDTH

VERSION = 2
SLOTS = {WIDTH: 720, 60: 2880, 900: 38400}  # seconds of a slot -> how many are kept: 2 hours, 48 hours, 400 days
COARSEST = max(SLOTS)

EPOCH = 1_577_836_800  # 2020, a slot of each width begins there: keys of the years until 2035 take five bytes
NUMBER_BITS = 16  # of a key are the number of a device or a holder
MOST_NUMBERS = 2**NUMBER_BITS - 1

TICK_MS, MEMORY_MIB = 40, 16  # the units in which time and memory are kept
# By the end of a column's name in tally: the end of its name in the tables, and the unit.
_UNITS = {"_ms": ("_ticks", TICK_MS), "_mib_sum": ("_16mib_sum", MEMORY_MIB), "_mib_max": ("_16mib_max", MEMORY_MIB)}
# Of a user's time: what is claimed is the sum of the first three.
USER_PARTS = ("used_ms", "idle_ms", "unknown_ms", "unclaimed_ms")
COLUMNS = {"devices": DEVICE_COLUMNS, "users": USER_PARTS, "waiting": WAITING_COLUMNS}

# What the numbers in the keys mean.  A holder without a device waits for one.
NAMES = (
    "CREATE TABLE devices (id INTEGER PRIMARY KEY, uuid TEXT UNIQUE NOT NULL, name TEXT, parent TEXT, place INTEGER)",
    "CREATE TABLE holders (id INTEGER PRIMARY KEY, uid INTEGER NOT NULL, device INTEGER NOT NULL, UNIQUE(uid, device))",
)


def stored(column: str) -> tuple[str, int]:
    """The name of a column in the tables, and the unit in which it is kept there."""
    for end, (kept, unit) in _UNITS.items():
        if column.endswith(end):
            return column.removesuffix(end) + kept, unit
    return column, 1


def key(slot: int, number: int, width: int) -> int:
    """Of the row of that device or holder; rows of one slot lie together."""
    return (slot - EPOCH // width << NUMBER_BITS) + number


def slot_of(row: int, width: int) -> int:
    """The slot of a key."""
    return (row >> NUMBER_BITS) + EPOCH // width


def rows(kind: str, width: int) -> str:
    """A query, to be put in brackets, for the rows from one key up to before another, with the columns of tally.

    Devices have `device`, a number; the others `uid` and, as a number, `device`; users also have `claimed_ms`.
    """
    columns = [f"(key >> {NUMBER_BITS}) + {EPOCH // width} AS slot"]
    columns += [f"{name} * {unit} AS {column}" for column in COLUMNS[kind] for name, unit in [stored(column)]]
    number = f"key & {MOST_NUMBERS}"
    if kind == "devices":
        return f"SELECT {number} AS device, {', '.join(columns)} FROM devices_{width}s WHERE key >= ? AND key < ?"
    if kind == "users":
        columns.append(f"(used_ticks + idle_ticks + unknown_ticks) * {TICK_MS} AS claimed_ms")
    return (
        f"SELECT uid, device, {', '.join(columns)} FROM {kind}_{width}s CROSS JOIN holders ON id = {number}"
        " WHERE key >= ? AND key < ?"
    )


def holdings(width: int) -> str:
    """A query, likewise, for what each user had of each device, `had`, and what that took: both in ticks and joules."""
    return (
        f"SELECT users.key >> {NUMBER_BITS} AS slot, device, uid, joules, seen, unknown,"
        " used_ticks + idle_ticks + unknown_ticks + unclaimed_ticks AS had"
        f" FROM users_{width}s AS users CROSS JOIN holders ON holders.id = users.key & {MOST_NUMBERS} CROSS JOIN"
        " (SELECT key AS place, energy_joules AS joules, seen_ticks AS seen, energy_unknown_ticks AS unknown"
        f" FROM devices_{width}s) ON place = (users.key & ~{MOST_NUMBERS}) + device"
        " WHERE users.key >= ? AND users.key < ?"
    )


def _table(kind: str, width: int) -> str:
    columns = ", ".join(
        f"{name} INTEGER" if name.endswith("_max") else f"{name} INTEGER NOT NULL"
        for name, _ in map(stored, COLUMNS[kind])
    )
    # By rowid: rows that are added at the end fill their pages to 96 %, WITHOUT ROWID to 84 %.
    return f"CREATE TABLE {kind}_{width}s (key INTEGER PRIMARY KEY, {columns})"


def _insert(kind: str, width: int) -> str:
    names = [name for name, _ in map(stored, COLUMNS[kind])]
    # MAX() of several values is NULL when one of them is.
    sums = ", ".join(
        f"{name} = MAX(COALESCE({name}, excluded.{name}), COALESCE(excluded.{name}, {name}))"
        if name.endswith("_max")
        else f"{name} = {name} + excluded.{name}"
        for name in names
    )
    return f"INSERT INTO {kind}_{width}s VALUES (?{', ?' * len(names)}) ON CONFLICT (key) DO UPDATE SET {sums}"


EACH = [(kind, width) for kind in COLUMNS for width in SLOTS]
TABLES = [*NAMES, *(_table(*each) for each in EACH)]
INSERT = {each: _insert(*each) for each in EACH}
