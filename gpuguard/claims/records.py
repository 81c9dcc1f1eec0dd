"""The claims that exist: the locks that are held, each with its record if there is one.

A claim has a record: one small JSON file that tells people who holds the devices and why.  The lock is the truth, the
record is a comment.  The record counts only while it is itself locked (by the descriptors that the job inherits, so it
dies with the claim).  Its owner is the uid of the file, no matter what its content says.  An unreadable record means
"claimed, no details".  A lock that is held without a record is reported as a claim of user "unknown"; devices that a
record names without their locks being held are left out.  A device that several claims share has slots, which are
further lock files beside its own.  A share holds the lock of the device LOCK_SH, so that shares and exclusive claims
exclude each other, and one slot LOCK_EX, so that the kernel limits the number of shares and any user can count them.

Behind the record of a living claim stand release requests, each a line of JSON, and the answers to them.  Its owner,
root, and a user who may look into the owner's processes can write there; the kernel enforces that.  The claim has the
file open, so it reads the requests for this very claim even if the path is gone, and no user can plant or flood it.

    released    it is decided: the locks are being released, and every reader of this finishes what was begun
    yield       please release the devices, the job may live on       stop    please end the job
    refused     no, and why                                           ending  the job is being ended

This module takes and releases nothing, and holds no lock for longer than a moment: see claim and unlock.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from gpuguard.claims import grants
from gpuguard.claims.directory import (
    Gate,
    LockDirectory,
    existing_locks,
    is_unlocked,
    open_lock,
    remove_if_same,
    try_flock,
)
from gpuguard.claims.grants import Grant
from gpuguard.claims.holders import held_by_no_process, holders_of, remembered
from gpuguard.device_state import grouped, lock_identity
from gpuguard.errors import ClaimError, LockDirectoryError, shortage
from gpuguard.files import closed_after, create_file, open_regular, status_in_place, write_all
from gpuguard.jsonio import loads, sound_fields
from gpuguard.locale.messages import cut, dumps, plain, sentence
from gpuguard.model import SLOTS, ClaimRecord, Snapshot
from gpuguard.units import local_time
from gpuguard.users import accountable_uids, certain_owner, user_name
from gpuguard.vendors import UUID_PREFIXES

MAX_BYTES = 4096
LARGEST = 2**50  # bytes: larger sizes in a record do not count
LATEST = 2**33  # unix time, in 2242: later times in a record do not count
MOST_OF_ONE = 500  # records of one user that are read: claims beyond them have no details
_FIELDS = (
    "devices",
    "pid",
    "since",
    "note",
    "command",
    "ends",
    "expected",
    "waited",
    "memory",
    "slots",
    "most",
    "max_processes",
    "job",
    "requeue",
)
_EXPECTED = b', "expected": '  # the last value of a record, behind which there is room for a time
_ROOM = b" " * 12

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)

RELEASED, YIELD, STOP, REFUSED, ENDING = "released", "yield", "stop", "refused", "ending"
_REQUESTS = frozenset({YIELD, STOP})
_WORDS = frozenset({RELEASED, YIELD, STOP, REFUSED, ENDING})
LONGEST = 400  # characters; a request has one reason, and it is for people
READ_BYTES = 16_384  # from the end: a record has 4 KiB, a request less than 3
REQUEST_BYTES = 3000  # beyond which a request has its reason as a text alone
FULL_BYTES = 65_536

_NOBODY = -1
_MOST_NAMED = 5  # users who hold a lock together
_owners: dict[str, dict[tuple[str, int], tuple[int, float]]] = {}  # directory -> (name, inode) -> (uid, time)
HOLDERS_SECONDS = 10.0  # after which a ClaimWatcher searches again for the holders of the locks
_ID = re.compile(r"(?:slurm[0-9]{1,11}-)?[A-Za-z0-9]{1,32}", re.ASCII)


def is_id(text: str) -> bool:
    """Return whether *text* can be the id of a claim, a ticket or a reservation: 1 to 32 letters and digits of ASCII.

    A claim in a job of Slurm that no prolog has claimed for begins with the job: ``slurm12-5f0e``.  An id stands in the
    name of a file, which any user can choose, and is shown to other users in commands that they may paste.
    """
    return _ID.fullmatch(text) is not None


def record_path(directory: LockDirectory, uid: int, claim_id: str) -> str:
    """Return the path of the record of a claim."""
    return f"{directory.records}/{directory.prefix}claim.{uid}.{claim_id}.json"


def unfinished_path(directory: LockDirectory) -> str:
    """Return the path at which a file is written before it is whole and gets its real name.

    The path is random: a user who knew it could make a file of that name first, and so keep the finished one away.
    """
    return f"{directory.records}/{directory.prefix}unfinished.{os.urandom(8).hex()}.new"


def write_record(directory: LockDirectory, content: Mapping[str, Any], owner: int | None = None) -> tuple[str, int]:
    """Write a record that lives as long as its descriptor or a copy of that in a job.

    *content* has the id of the claim; *owner* is the uid for whom root writes it.  Returns the path of the record and
    its locked descriptor (close-on-exec).
    """
    path = record_path(directory, os.geteuid() if owner is None else owner, str(content["id"]))
    unfinished = unfinished_path(directory)
    descriptor = create_file(unfinished, owner=owner)
    try:
        try_flock(descriptor)
        write_all(descriptor, _encoded(content))
        try:
            os.rename(unfinished, path)  # readers see it whole, and already locked
        except IsADirectoryError:  # a directory was put there: the two are exchanged
            import ctypes  # 1 ms, which a command that only looks does not need

            library = ctypes.CDLL(None, use_errno=True)
            names = (_AT_FDCWD, os.fsencode(unfinished), _AT_FDCWD, os.fsencode(path))
            if library.renameat2(*names, _RENAME_EXCHANGE):
                raise
    except BaseException:
        for name in (unfinished, path):  # at an interruption it may have its real name already
            remove_if_same(descriptor, name)
        os.close(descriptor)
        raise
    return path, descriptor


def _encoded(content: Mapping[str, Any]) -> bytes:
    content = dict(content)
    # The command line is the one part that may be long.  The claim is worth more than the last arguments of its job.
    while len(encoded := json.dumps({**content, "expected": None}).encode()) > MAX_BYTES - len(_ROOM):
        command, note = content.get("command") or (), content.get("note") or ""
        if command:
            content["command"] = [word[:200] for word in command[: len(command) // 2]]
        else:
            content["note"] = note[: len(note) // 2]
    return encoded[:-1] + _ROOM + b"}"


def write_expected(descriptor: int, when: float) -> None:
    """Write into a record when (unix time) its job should end, in place, because a job has the file open."""
    record = os.pread(descriptor, MAX_BYTES, 0).partition(b"\n")[0]
    offset = record.rfind(_EXPECTED) + len(_EXPECTED)
    room = len(record) - len(b"}") - offset
    if _EXPECTED in record and len(text := b"%.3f" % when) <= room:
        os.pwrite(descriptor, text.ljust(room), offset)


def read_records(directory: LockDirectory) -> list[ClaimRecord]:
    """Return all records whose claim lives, oldest first; remove those of dead claims if this user may do so."""
    start = f"{directory.prefix}claim."
    names = [name for name in directory.names() if name.startswith(start) and name.endswith(".json")]
    names, _ = first_of_each(directory, names, MOST_OF_ONE)
    records = [record for name in names if (record := _read_record(directory, name))]
    return sorted(records, key=lambda record: (record.since or 0, record.id))


def read_record(directory: LockDirectory, uid: int, claim_id: str) -> ClaimRecord | None:
    """Return the record of one living claim of one user, or None if there is none."""
    if directory.is_missing() or not all(map(is_id, claim_id.split("."))):
        return None
    return _read_record(directory, record_path(directory, uid, claim_id).removeprefix(f"{directory.records}/"))


def of_their_users(claims: Sequence[ClaimRecord]) -> tuple[ClaimRecord, ...]:
    """Return *claims* in their order, each as a claim of the user to whom root has given the uid of its file.

    If that user already has a claim with the same id, the claim gets another id, so that none hides another from the
    rules.
    """
    taken, found = {(claim.uid, claim.id) for claim in claims}, list[ClaimRecord]()
    for claim in claims:
        uid, name = certain_owner(claim.uid), claim.id
        while uid != claim.uid and (uid, name) in taken:
            name = f"{name}-{claim.uid}"
        taken.add((uid, name))
        found.append(claim if uid == claim.uid else replace(claim, id=name, uid=uid, user=user_name(uid)))
    return tuple(found)


def first_of_each(directory: LockDirectory, names: list[str], most: int) -> tuple[list[str], dict[int, int]]:
    """Return the first *most* files of each user, and uid -> how many more there are; root's are not counted.

    The limit is needed because everybody reads all of them, and any user can make any number.
    """
    if len(names) <= most:
        return names, {}
    of_user = files_by_user(directory, frozenset(names).__contains__)
    beyond = {uid: len(own) - most for uid, own in of_user.items() if uid and len(own) > most}
    return [name for uid, own in of_user.items() for _, name in own[: most if uid else None]], beyond


def files_by_user(directory: LockDirectory, is_wanted: Callable[[str], bool]) -> dict[int, list[tuple[float, str]]]:
    """Return uid -> (time of the last change, name) of the user's files, oldest first; see users.accountable_uids.

    The facts about a file are remembered while it exists: there may be thousands, and their owners never change.
    """
    known, files = _owners.get(directory.records, {}), dict[tuple[str, int], tuple[int, float]]()
    with nullcontext(()) if directory.is_missing() else os.scandir(directory.records) as entries:
        for entry in [entry for entry in entries if is_wanted(entry.name)]:
            key = entry.name, entry.inode()
            with suppress(OSError):  # it has just ended
                status = None if key in known else status_in_place(entry.path)
                files[key] = (status.st_uid, status.st_ctime) if status else known[key]
    _owners[directory.records] = files
    whose = accountable_uids({uid for uid, _since in files.values()})
    oldest_first = sorted((since, name, uid) for (name, _inode), (uid, since) in files.items())
    return grouped((whose[uid], (since, name)) for since, name, uid in oldest_first)


def _read_record(directory: LockDirectory, name: str) -> ClaimRecord | None:
    path = f"{directory.records}/{name}"
    try:
        descriptor, status = open_regular(path)
    except OSError as error:
        if shortage(error):  # the record still exists
            raise
        return None
    with closed_after(descriptor):
        if is_unlocked(descriptor):
            if os.geteuid() in (status.st_uid, 0):
                remove_if_same(descriptor, path)
            return None
        key = name[len(f"{directory.prefix}claim.") : -len(".json")]
        uid, *claim_id = key.split(".")
        if len(claim_id) not in (1, 2) or not all(map(is_id, claim_id)):  # 2: a claim inside another one
            return None
        # Otherwise it has the name of another user's record.  In a user namespace all other users look like one.
        if uid != str(status.st_uid) and status.st_uid != os.lstat(directory.records).st_uid:
            return None
        record = _decoded(os.read(descriptor, MAX_BYTES + 1), status.st_uid, key)
        return replace(record, written=status.st_ctime)


def _decoded(encoded: bytes, uid: int, key: str) -> ClaimRecord:
    encoded = encoded.partition(b"\n")[0]  # release requests stand behind it
    try:
        content = plain(loads(encoded)) if len(encoded) <= MAX_BYTES else None  # a user's words are no sentences
    except ValueError:
        content = None
    fields = {
        name: value
        for name, value in sound_fields(ClaimRecord, content, _FIELDS).items()
        # Readers calculate with these: an infinite number would end a reader that subtracts it from a time.
        if not isinstance(value, int | float) or 0 <= value <= (LARGEST if name == "memory" else LATEST)
    }
    return ClaimRecord(**{"devices": (), **fields}, id=key.partition(".")[2], uid=uid, user=user_name(uid))


@dataclass(frozen=True)
class ReleaseRequest:
    """One line behind a record: a request, or the answer to one."""

    what: str  # RELEASED, YIELD, STOP, REFUSED or ENDING
    by: str  # who wrote it: "root", "alice", "the policy idle-claims"
    why: str = ""  # for people
    at: float = 0.0  # unix time

    def in_words(self) -> str:
        """Return ``"by root at 15:04: others wait"``."""
        by = sentence("release.by", "by {by}", by=self.by)
        if self.at:
            by = sentence("release.by_at", "by {by} at {time}", by=self.by, time=local_time(self.at, "%H:%M"))
        return sentence("because", "{what}: {why}", what=by, why=self.why) if self.why else by


def write_request(descriptor: int, request: ReleaseRequest) -> int:
    """Write a request or an answer behind a record, and return where it ends in the file.

    Room is made for it, no matter how many were answered before and what the owner has written there.

    Raises:
        ClaimError: there is no room, and none can be made because a decision stands there.
        OSError: it cannot be written.
    """
    end = os.fstat(descriptor).st_size
    if end > FULL_BYTES and (request.what == RELEASED or not released_by(descriptor)):
        end = MAX_BYTES  # of the record itself
        os.ftruncate(descriptor, end)
    if end > FULL_BYTES:
        raise ClaimError(
            sentence(
                "claim.record_full",
                "the record of this claim is full of release requests: end its processes instead.",
            )
        )
    content = {
        "what": request.what,
        "by": cut(request.by, LONGEST),
        "why": cut(request.why, LONGEST),
        "at_unix_seconds": round(request.at or time.time(), 3),
    }
    encoded = dumps(content)
    line = b"\n" + (encoded if len(encoded) <= REQUEST_BYTES else dumps(plain(content))) + b"\n"
    if os.pwrite(descriptor, line, end) < len(line):
        raise OSError(errno.ENOSPC, "no space left for a release request")
    return end + len(line)


def read_requests(descriptor: int, behind: int | None = None) -> tuple[ReleaseRequest, ...]:
    """Return the requests and answers behind a record, oldest first, without the lines that cannot be read.

    *behind* is where a request ends of which only the answers are wanted, or None for the newest lines of all.
    """
    size = os.fstat(descriptor).st_size
    begin = max(0, size - READ_BYTES) if behind is None else behind
    if begin > size:  # the answer has made room for itself
        begin = MAX_BYTES
    tail = os.pread(descriptor, READ_BYTES, begin)
    lines = tail.split(b"\n")[1:]  # the first one is the record, or a piece of a request
    return tuple(request for line in lines if line and (request := _decode_request(line)))


def released_by(descriptor: int) -> ReleaseRequest | None:
    """Return the decision that this claim is released, or None if there is none."""
    try:
        return next((request for request in read_requests(descriptor) if request.what == RELEASED), None)
    except OSError:
        return None  # the program has closed our descriptor


def pending_request(descriptor: int) -> ReleaseRequest | None:
    """Return the last request if it was not answered yet, or None."""
    try:
        requests = read_requests(descriptor)
    except OSError:
        return None
    return requests[-1] if requests and requests[-1].what in _REQUESTS else None


def _decode_request(line: bytes) -> ReleaseRequest | None:
    try:
        content = loads(line)
    except ValueError:
        return None
    if isinstance(content, dict):
        content["at"] = content.get("at_unix_seconds")
    fields = sound_fields(ReleaseRequest, content, ("what", "by", "why", "at"))
    if fields.get("what") not in _WORDS:
        return None
    at = fields.get("at", 0.0)
    return ReleaseRequest(
        fields["what"],
        by=cut(fields.get("by", ""), LONGEST),
        why=cut(fields.get("why", ""), LONGEST),
        at=float(at) if 0 <= at < 2**40 else 0.0,
    )


def slot_names(uuid: str) -> tuple[str, ...]:
    """Return the names of the lock files of a device's slots."""
    return tuple(f"{uuid}.slot{number}" for number in range(SLOTS))


def locked_slots(directory: LockDirectory, uuid: str) -> tuple[str, ...]:
    """Return the slots of a device that are held now.  The gate is not locked here: do so first if it matters."""
    # The sticky directory has no files for the slots until a claim shares the device, and the first is taken first.
    if not existing_locks(directory, [f"{uuid}.slot0"]):
        return ()
    return tuple(name for name in slot_names(uuid) if _is_locked(directory, name))


def locked_devices(directory: LockDirectory, uuids: Iterable[str]) -> set[str]:
    """Return those of *uuids* (or other names of locks) whose lock is held exclusively or by a share.

    This locks the gate, so that no claim is disturbed.  A GPU of which only MIG instances are claimed is not among
    them, because its lock is held shared.
    """
    with Gate(directory):
        return set(_held_and_granted(directory, uuids)[0].values())


def locks_held(directory: LockDirectory, uuids: Iterable[str]) -> frozenset[str]:
    """Return the names of all locks that are held on these devices, those of whole devices and those of shares."""
    with Gate(directory):
        return frozenset(_held_and_granted(directory, uuids)[0])


def probe(
    directory: LockDirectory,
    uuids: Iterable[str],
    *,
    known: Sequence[ClaimRecord] = (),
    sought: Sequence[ClaimRecord] = (),
) -> tuple[ClaimRecord, ...]:
    """Return the claims of the devices now: one record per claim, with only the devices and slots really locked.

    *known* are claims that were found a moment ago.  The holders of those that still live are believed, except for
    holders that have ended since, because finding them again means reading every process of the machine.  *sought* are
    claims that this process found before: if it saw no holder of the same locks then, it does not search again, unless
    it took the claim for hidden.
    """
    with Gate(directory):
        locked, granted = _held_and_granted(directory, uuids)
    return _claims(directory, locked, granted, known, sought)


def probe_in_gate(directory: LockDirectory, uuids: Iterable[str], *, holders: bool = False) -> tuple[ClaimRecord, ...]:
    """Return the claims as probe() does, for a caller that has the gate.  With *holders*, every process is read."""
    locked, granted = _held_and_granted(directory, uuids)
    if holders or not locked:
        return _claims(directory, locked, granted)
    return _join(locked, read_records(directory), {}, granted)


class ClaimWatcher:
    """Probes the claims of a directory again and again, for callers that show them or look again before they act.

    It reads each time which locks are held, but searches for their holders only every HOLDERS_SECONDS, because the
    search reads every process of the machine.  A caller that claims or releases something uses probe() itself.
    """

    def __init__(self) -> None:
        self._known: tuple[ClaimRecord, ...] = ()
        self._forgets_at = float("-inf")

    def probe(
        self, directory: LockDirectory, uuids: Iterable[str], known: Sequence[ClaimRecord] = ()
    ) -> tuple[ClaimRecord, ...]:
        """Return the claims as probe() does; *known* are those that another process (the daemon) found a moment ago."""
        now = time.monotonic()
        if now >= self._forgets_at:
            self._known, self._forgets_at = (), now + HOLDERS_SECONDS
        self._known = probe(directory, uuids, known=known or self._known, sought=self._known)
        return self._known

    def prepare(self, directory: LockDirectory) -> None:
        """Find the holders of the locks now, while the caller waits for something else."""
        start = directory.prefix
        names = [name.removeprefix(start) for name in os.listdir(directory.locks) if name.startswith(start)]
        self.probe(directory, [name for name in names if name.startswith(UUID_PREFIXES) and ".slot" not in name])


class FirstSeen:
    """The ages of claims, for a caller that samples again and again: each is as old as the caller has known it.

    The age in a record is only its owner's word.  A user who wrote each minute that a claim was just made would never
    be judged by rules that leave a new claim alone for a while, and one who wrote that it is old would be spared by
    quotas, at the expense of others.  So a claim is as old as the first sample that shows it.  In the first sample of
    all, it is as old as the last change of its record.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], float] = {}  # a claim on one device -> CLOCK_BOOTTIME
        self._has_looked = False

    def remember(self, before: Snapshot) -> None:
        """Begin with the claims that another guard saw in this boot; *before* is its last sample, after dated()."""
        boot = before.taken_at - before.clock
        for claim in before.claims:
            if claim.since is not None:
                self._seen.update(dict.fromkeys(_places(claim), claim.since - boot))
        self._has_looked = True

    def dated(self, claims: Iterable[ClaimRecord], clock: float, now: float) -> tuple[ClaimRecord, ...]:
        """Return *claims*, found at *clock* (CLOCK_BOOTTIME) or *now* (unix time), each as old as it was seen."""
        seen: dict[tuple[object, ...], float] = {}
        dated = []
        for claim in claims:
            old = 0.0 if self._has_looked or claim.written is None else max(0.0, now - claim.written)
            places = {place: self._seen.get(place, clock - old) for place in _places(claim)}
            seen.update(places)
            # The earliest time counts, because a claim may have got a device since.
            dated.append(replace(claim, since=round(now - (clock - max(places.values())), 3)))
        self._seen, self._has_looked = seen, True
        return tuple(dated)


def _places(claim: ClaimRecord) -> list[tuple[object, ...]]:
    return [lock_identity(claim, uuid) for uuid in claim.devices or ("",)]


def _claims(
    directory: LockDirectory,
    locked: Mapping[str, str],
    granted: Mapping[str, Grant | None],
    known: Sequence[ClaimRecord] = (),
    sought: Sequence[ClaimRecord] = (),
) -> tuple[ClaimRecord, ...]:
    if not locked:
        return ()
    records = read_records(directory)
    holders = remembered(known, records)
    claims = _join(locked, records, holders, granted)
    # Hidden claims are searched for each time: that no process holds one, so that it protects none, must be true now.
    in_vain = {_locks_of(claim) for claim in sought if not claim.holders and not claim.hidden}
    sought_before = {name for claim in claims if _locks_of(claim) in in_vain for name in claim.slots or claim.devices}
    if locked.keys() <= holders.keys() | sought_before:
        return claims
    uids = {record.uid for record in records}
    holders = holders_of(directory, set(locked), lambda uid: uid in uids)
    if lost := locked.keys() - holders.keys():  # a lock without a record, or with another user's
        holders.update(holders_of(directory, lost, lambda uid: uid not in uids))
    if (lost := locked.keys() - holders.keys()) and os.geteuid() == 0:  # other users see no files but their own
        holders.update(holders_of(directory, lost, lambda uid: True, by_any_name=True))
    claims = _join(locked, records, holders, granted)
    ownerless = {name for claim in claims if claim.uid == _NOBODY for name in claim.slots or claim.devices}
    hidden = held_by_no_process(directory, ownerless - holders.keys())
    return tuple(replace(claim, hidden=True) if hidden & {*claim.slots, *claim.devices} else claim for claim in claims)


def _locks_of(claim: ClaimRecord) -> tuple[object, ...]:
    return claim.id, claim.uid, claim.devices, claim.slots


def _join(
    locked: Mapping[str, str],
    records: Sequence[ClaimRecord],
    holders: Mapping[str, Mapping[int, int]],
    granted: Mapping[str, Grant | None],
) -> tuple[ClaimRecord, ...]:
    """Return the records with those of the held locks (name -> uuid) that are theirs, and one for each other lock.

    The daemon knows to whom it has given a lock, whatever a record says.
    """
    claims = []
    explained: set[str] = set()
    for record in records:
        names = {
            name
            for name, uuid in locked.items()
            if uuid in record.devices
            # A share of a device holds a slot.  A record that names a slot does not have the device exclusively.
            and (name in record.slots if name != uuid else not record.slots)
            and _may_hold(record, holders.get(name, {}), granted.get(name))
        }
        held = {locked[name] for name in names}
        devices = tuple(uuid for uuid in record.devices if uuid in held)
        if devices or not record.devices:
            pids = {pid for name in names for pid in holders.get(name, {})}
            for grant in filter(None, map(granted.get, names)):
                record = grant.confirmed(record)
            slots = tuple(sorted(names - held))
            claims.append(replace(record, devices=devices, slots=slots, holders=tuple(sorted(pids))))
            explained |= names
    unexplained: dict[str, ClaimRecord] = {}
    for name in sorted(locked.keys() - explained):
        claim = _without_record(name, locked[name], holders.get(name, {}), granted.get(name))
        same = unexplained.get(claim.id, claim)  # several devices that were given to one claim
        devices, slots = (*same.devices, *claim.devices), (*same.slots, *claim.slots)
        unexplained[claim.id] = replace(claim, devices=tuple(dict.fromkeys(devices)), slots=tuple(dict.fromkeys(slots)))
    return (*claims, *unexplained.values())


def _without_record(name: str, uuid: str, holders: Mapping[int, int], grant: Grant | None) -> ClaimRecord:
    uids = set(holders.values())
    # A process of root may keep a lock that it was sent, and a user with further uids (/etc/subuid) is one user.
    owners = accountable_uids(uids - {0} or uids)
    several = len(set(owners.values())) > 1
    uid = grant.uid if grant else min(owners) if owners and not several else _NOBODY
    user = user_name(uid) if uid >= 0 else _first_of_each_user(holders, owners) if several else "unknown"
    slots = (name,) if name != uuid else ()
    claim_id = grant.claim if grant else f"no-record-{uuid[:12]}{name[len(uuid) :].replace('.', '-')}"
    record = ClaimRecord(claim_id, uid, user, (uuid,), holders=tuple(sorted(holders)), slots=slots)
    record = replace(record, hidden=uid < 0 and several)
    return grant.confirmed(record) if grant else record


def _first_of_each_user(holders: Mapping[int, int], owners: Mapping[int, int]) -> str:
    """Return ``"alice (pid 12) and bob (pid 34)"``, the users who hold a lock together."""
    first = {owners[uid]: f"{user_name(uid)} (pid {pid})" for pid, uid in sorted(holders.items(), reverse=True) if uid}
    return " and ".join(sorted(first.values())[:_MOST_NAMED])


def _may_hold(record: ClaimRecord, holders: Mapping[int, int], grant: Grant | None) -> bool:
    """Return False for a record that names a device which is visibly another user's."""
    if grant:
        return (record.uid, record.id.partition(".")[0]) == (grant.uid, grant.claim)
    owners = accountable_uids([record.uid, *holders.values()])
    return not holders or owners[record.uid] in [owners[uid] for uid in holders.values()]


def _held_and_granted(
    directory: LockDirectory, uuids: Iterable[str]
) -> tuple[dict[str, str], Mapping[str, Grant | None]]:
    """Return the locks that are held, name -> uuid, and the grants of those that the daemon gave, if it gives any."""
    if directory.closed:
        return _held_by_word_of_the_daemon(directory, set(uuids))
    locked = {}
    for uuid in existing_locks(directory, uuids):
        try:
            descriptor = open_lock(directory, uuid)
        except LockDirectoryError:
            locked[uuid] = uuid  # planted: no user can claim it until root has looked at it
            continue
        with closed_after(descriptor):
            if not is_unlocked(descriptor):
                locked[uuid] = uuid  # one claim has it alone
            elif slots := locked_slots(directory, uuid):
                locked.update(dict.fromkeys(slots, uuid))
            elif (
                directory.keeper is not None
                # A file of which a user may have kept a descriptor is replaced; an empty one is locked shared by root.
                and not grants.renew(directory, uuid, descriptor)
                and os.fstat(descriptor).st_size
            ):
                locked[uuid] = uuid
    return locked, {} if directory.keeper is None else grants.grant_of(directory, locked)


def _held_by_word_of_the_daemon(
    directory: LockDirectory, uuids: set[str]
) -> tuple[dict[str, str], Mapping[str, Grant | None]]:
    granted = grants.granted(directory)
    if granted is None:  # no daemon: no user can claim now, and existing claims are known by their records
        pairs = [(record, uuid) for record in read_records(directory) for uuid in record.devices if uuid in uuids]
        return {name: uuid for record, uuid in pairs for name in record.slots or (uuid,) if uuid in name}, {}
    names = [(name, name if name in uuids else name.rpartition(".slot")[0]) for name in granted]
    return {name: uuid for name, uuid in names if uuid in uuids}, granted


def _is_locked(directory: LockDirectory, name: str) -> bool:
    if not existing_locks(directory, [name]):
        return False
    try:
        descriptor = open_lock(directory, name)
    except LockDirectoryError:
        return True  # planted: until root has looked at it, it is unknown what it hides
    with closed_after(descriptor):
        if directory.keeper is None:
            return not is_unlocked(descriptor)
        # The daemon gave the lock: its receiver may hold it shared, or keep a descriptor of it.
        return not grants.renew(directory, name, descriptor)
