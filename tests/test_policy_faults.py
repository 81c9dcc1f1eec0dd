"""Policy files that are refused, each with the place and the reason.  A ``«`` marks where the fault must be found."""

from __future__ import annotations

import pytest
from policies import document, marked, read

UNIT = "has no unit"
SECOND = "a second time"
UNKNOWN = "is no key of"

WHOLE = [  # texts of whole files
    ("«", "the file is empty"),
    ("«# only a comment\n", "the file is empty"),
    ("---\n«", "the value is missing"),
    ("«policies", "must have keys"),
    ("«[]", "must have keys"),
    ("«- version: 1\n", "must have keys"),
    ("«{}", "lacks the key"),
    ("«version: 1\n", "lacks the key 'policies'"),
    ("«policies: [{name: a, when: {unclaimed: {}}, steps: [log]}]\n", "lacks the key 'version'"),
    ("version: 1\npolicies: «[]\n", "the list is empty"),
    ("version: 1\npolicies:« \n", "the value is missing"),
    ("version: 1\npolicies: «{name: a}\n", "must be a list"),
    ("version: 1\npolicies: «none\n", "must be a list"),
    ("version: 1\npolicies: [«a]\n", "must have keys"),
    ("version: 1\npolicies: [«[a]]\n", "must have keys"),
    ("version: «2\n" + document()[11:], "no choice: write one of 1"),
    ("version: «1.0\n" + document()[11:], "no choice"),
    ("version: «01\n" + document()[11:], "no choice"),
    ("version:« \n" + document()[11:], "the value is missing"),
    (document() + "«---\n" + document(), "a second document"),
    (document() + "...\n«---\nversion: 1\n", "a second document"),
    ("«%YAML 1.1\n---\n" + document(), "a directive"),
    ("«%TAG ! tag:example.org,2000:\n---\n" + document(), "a directive"),
    (document() + "«\tmode: enforce\n", "not YAML"),
    (document() + "mode: «'enforce\n", "not YAML"),
    (document() + "«}\n", "not YAML"),
    (document() + "mode: «[a\n", "not YAML"),
    (document() + "mode: «@enforce\n", "not YAML"),
    (document() + "mode: «%enforce\n", "not YAML"),
    (document() + "mode: a«: b\n", "not YAML"),
    (document() + "# a comment«\x85mode: enforce\n", "U+0085"),
    (document() + "# a comment«\u2028mode: enforce\n", "U+2028"),
    (document() + "# a comment«\u2029mode: enforce\n", "U+2029"),
    (document() + "# a comment«\rmode: enforce\n", "U+000D"),
    (document() + "mode: en«\u200bforce\n", "U+200B"),
    (document() + "# «\u202eecrofne :edom\n", "U+202E"),
    (document() + "mode: en«\u00adforce\n", "U+00AD"),
    (document() + "mode: enforce«\x00\n", "U+0000"),
    (document() + "mode: «\x1b[31menforce\n", "U+001B"),
    (document() + "mode: «\ufeffenforce\n", "U+FEFF"),
    (document() + "deep: " + "[" * 15 + "«[\n", "more than 16 levels"),
    (document() + "deep: " + "[" * 15 + "«[" + "[" * 5000, "more than 16 levels"),
    (document() + "deep: " + "{a: " * 15 + "«{a: b}\n", "more than 16 levels"),
]

TOP = [  # lines of the file
    ("mode: «enforc", "Did you mean 'enforce'?"),
    ("mode: «Enforce", "no choice"),
    ("mode: «yes", "no choice"),
    ("mode: «~", "no choice"),
    ("mode:« ", "the value is missing"),
    ("mode: «''", "the value is empty"),
    ("mode: «[enforce]", "must be one value"),
    ("mode: «{enforce: true}", "must be one value"),
    ("mode: observe\n«mode: enforce", SECOND),
    ("mode: observe\n«'mode': enforce", SECOND),
    ("«version: 1", SECOND),
    ("«Mode: enforce", "Did you mean 'mode'?"),
    ("«enforce: true", UNKNOWN),
    ("«modes: enforce", "Did you mean 'mode'?"),
    ("? «[mode]\n: enforce", "must be a name"),
    ("? «{mode: a}\n: enforce", "must be a name"),
    ("«: enforce", "not YAML"),
    ("mode: «&m enforce", "an anchor (&m)"),
    ("mode: «!!str enforce", "a tag (!!str)"),
    ("mode: «!!python/object/apply:os.system enforce", "a tag (!!python/object/apply:os.system)"),
    ("mode: «! enforce", "a tag (!)"),
    ("mode: «!secret enforce", "a tag (!secret)"),
    ("«<<: {mode: enforce}", "a merge key"),
    ("mode: «enf\n  orce", "goes on in the next line"),
    ("notify: «[ops]", "must have keys"),
    ("notify: {ops: «ops@example.org}", "must have keys"),
    ("notify: {ops: «{}}", "exactly one way to send is needed"),
    ("notify: {ops: {«mail: ops@example.org}}", "Did you mean 'email'?"),
    ("notify: {ops: «{email: a@example.org, hook: {command: [/bin/true]}}}", "here are 2"),
    ("notify: {«Ops: {email: ops@example.org}}", "is no name"),
    ("notify: {ops: {email: a@example.org}, «ops: {email: b@example.org}}", SECOND),
    ("notify: {ops: {email: {to: a@example.org, port: «0x19}}}", "not a whole number"),
    ("notify: {ops: {email: {to: a@example.org, port: «1_000}}}", "not a whole number"),
    ("notify: {ops: {email: {to: a@example.org, timeout: «10}}}", UNIT),
    ("notify: {ops: {email: «{server: mail.example.org}}}", "lacks the key 'to'"),
    ("notify: {ops: {email: {to: a@example.org, password: {«text: secret}}}}", UNKNOWN),
    ("notify: {ops: {hook: «{command: [tell]}}}", "begins with a path"),
    ("notify: {ops: {hook: {command: «/bin/true --now}}}", "must be a list"),
    ("messages: {«fr: {subject: a, body: b}}", "no choice"),
    ("messages: {en: {«subjcet: a}}", "Did you mean 'subject'?"),
    ("interval: {shortest: «5}", UNIT),
    ("interval: {shortest: «0s}", "out of range"),
    ("interval: {longest: «2h}", "out of range"),
    ("interval: «{shortest: 20s, longest: 10s}", "exchange them"),
    ("interval: «10s", "Known: shortest, longest."),
]

POLICY = [  # lines of a policy
    ("for: «2", UNIT),
    ("for: «1:30", "is not a duration"),
    ("for: «22:00", "is not a duration"),
    ("for: «010", UNIT),
    ("for: «1e3", "is not a duration"),
    ("for: «.inf", "is not a duration"),
    ("for: «-5m", "is not a duration"),
    ("for: «2 hours", "is not a duration"),
    ("for: «2H", "is not a duration"),
    ("for: «1h 30m", "is not a duration"),
    ("for: «null", "is not a duration"),
    ("for: «no", "is not a duration"),
    ("for:« ", "the value is missing"),
    ('for: «""', "the value is empty"),
    ('for: «" "', "the value is empty"),
    ("for: «[2h]", "must be one value"),
    ("for: «2h\n  30m", "goes on in the next line"),
    ("for: 2h\n«for: 3h", SECOND),
    ("for: «*d", "an alias (*d)"),
    ("«form: 2h", "Did you mean 'for'?"),
    ("«startgrace: 2h", "Did you mean 'start_grace'?"),
    ("start_grace: «30", UNIT),
    ("«action: terminate", UNKNOWN),
    ("«name: q", SECOND),
    ("only: «alice", "must have keys"),
    ("only: «[alice]", "must have keys"),
    ("only: «{}", "nobody is named"),
    ("only: {users: «alice}", "Write [alice]."),
    ("only: {users: «no}", "Write [no]."),
    ("only: {users: «[]}", "the list is empty"),
    ("only: {users: [«alcie]}", "there is no user 'alcie'"),
    ("only: {users: [«'*']}", "there is no user '*'"),
    ("only: {users: [«all]}", "there is no user 'all'"),
    ("only: {users: [«0777]}", "there is no user '0777'"),
    ("only: {users: [«0x3e8]}", "there is no user '0x3e8'"),
    ("only: {users: [«-1]}", "there is no user '-1'"),
    ("only: {users: [«4294967295]}", "is no uid"),
    ("only: {users: [alice, «[bob]]}", "must be one value"),
    ("only: {groups: [«staf]}", "there is no group 'staf'"),
    ("only: {groups: [«50]}", "there is no group '50'"),
    ("only: {devices: [«card0]}", "is no device"),
    ("only: {devices: [«00]}", "is no device"),
    ("only: {devices: [«-1]}", "is no device"),
    ("only: {devices: [«GPU-]}", "is no device"),
    ("only: {devices: [«gpu0]}", "is no device"),
    ("only: {devices: «0}", "Write [0]."),
    ("only: {kinds: [«notebook]}", "no choice"),
    ("only: {kinds: [«Batch]}", "Did you mean 'batch'?"),
    ("only: {«gpus: [0]}", "Did you mean 'devices'?"),
    ("only: {models: «A100*}", "Write [A100*]."),
    ("only: {«until: 2026-12-24, users: [alice]}", UNKNOWN),
    ("only: {«user: [alice]}", "Did you mean 'users'?"),
    ("except: {users: «no}", "Write [no]."),
    ("except: «{until: 2026-12-24}", "nobody is named"),
    ("except: {users: [alice], until: «2026-13-24}", "is no date"),
    ("except: {users: [alice], until: «2026-02-30}", "is no date"),
    ("except: {users: [alice], until: «24.12.2026}", "is no date"),
    ("except: {users: [alice], until: «20261224}", "is no date"),
    ("except: {users: [alice], until: «2026-12-24 18:00}", "is no date"),
    ("except: [«alice]", "must have keys"),
    ("except: [{users: [alice]}, «{}]", "nobody is named"),
    ("devices_at_least: «0", "not a whole number from 1 on"),
    ("devices_at_least: «1.5", "not a whole number from 1 on"),
    ("devices_at_least: «two", "not a whole number from 1 on"),
    ("hours: «22:00", "are no hours"),
    ("hours: «22-7", "are no hours"),
    ("hours: «9:00-17:00", "are no hours"),
    ("hours: «22:00-25:00", "00:00 to 24:00"),
    ("hours: «24:00-07:00", "00:00 to 24:00"),
    ("hours: «08:00-08:60", "are no hours"),
    ("hours: «08:00-08:00", "begins when it ends"),
    ("hours: «[22:00-07:00]", "must be one value"),
    ("days: «mon", "Write [mon]."),
    ("days: [«Monday]", "no choice"),
    ("days: [«Mon]", "Did you mean 'mon'?"),
    ("days: [«1]", "no choice"),
    ("days: «[mon, mon]", "named twice"),
    ("claimed_above: «80", UNIT),
    ("claimed_above: «0.8", UNIT),
    ("claimed_above: «.nan", "is not a percentage"),
    ("claimed_above: «120%", "more than 100%"),
    ("claimed_above: «-5%", "is not a percentage"),
    ("at_most: «3", "must have keys"),
    ("at_most: {users: «0}", "not a whole number from 1 on"),
    ("at_most: {users: «010}", "not a whole number from 1 on"),
    ("at_most: {users: «1e9}", "not a whole number from 1 on"),
    ("at_most: {«user: 3}", "Did you mean 'users'?"),
    ("cooldown: «15", UNIT),
    ("cooldown: «15min", "is not a duration"),
    ("mode: «on", "no choice"),
    ("mode: «true", "no choice"),
]

WHEN = [
    ("«idle", "must have keys"),
    ("«{}", "exactly one rule is needed, and here are 0"),
    ("«{idle: {below: 5%}, memory: {above: 1GiB}}", "here are 2"),
    ("{«idel: {below: 5%}}", "Did you mean 'idle'?"),
    ("{«gpu_idle: {below: 5%}}", "is no rule"),
    ("{idle:« }", "Write {} when it needs no keys."),
    ("{idle: «5%}", "must have keys"),
    ("{idle: «{}}", "lacks the key 'below'"),
    ("{idle: «{cpu_below: 5%}}", "lacks the key 'below'"),
    ("{idle: {below: «5}}", UNIT),
    ("{idle: {below: «0.05}}", UNIT),
    ("{idle: {below: «5.}}", "is not a percentage"),
    ("{idle: {below: «five}}", "is not a percentage"),
    ("{idle: {below: «105%}}", "more than 100%"),
    ("{idle: {below: 5%, «bellow: 6%}}", "Did you mean 'below'?"),
    ("{idle: {below: 5%, «below: 6%}}", SECOND),
    ("{idle: {below: 5%, window: «moving}}", "no choice"),
    ("{idle: «{below: 5%, window: sliding}}", "over"),
    ("{idle: «{below: 5%, over: 2h}}", "over"),
    ("{idle: {below: 5%, network_below: «1MB}}", "not a rate"),
    ("{idle: {below: 5%, memory_above: «1}}", UNIT),
    ("{memory: {above: «40}}", UNIT),
    ("{memory: {above: «40G}}", "is not a memory size"),
    ("{memory: {above: «40gb}}", "is not a memory size"),
    ("{memory: {above: «1e10}}", "is not a memory size"),
    ("{memory: {above: «.inf}}", "is not a memory size"),
    ("{memory: {above: 40GiB, per: «job}}", "no choice"),
    ("{memory_growth: {above: «1GiB}}", "not a rate"),
    ("{temperature: {above: «85}}", UNIT),
    ("{temperature: {above: «85F}}", "is not a temperature"),
    ("{temperature: {above: «-1C}}", "is not a temperature"),
    ("{power: {above: «300}}", UNIT),
    ("{utilization: «{}}", "exactly one of above and below"),
    ("{utilization: «{above: 90%, below: 95%}}", "exactly one of above and below"),
    ("{processes: {above: «2.5}}", "not a whole number"),
    ("{processes: {above: «-1}}", "not a whole number"),
    ("{processes: {above: «02}}", "not a whole number"),
    ("{unclaimed: «[]}", "must have keys"),
    ("{unclaimed: {min_memory: «1024}}", UNIT),
    ("{trespass: {containers: «yes}}", "neither true nor false"),
    ("{trespass: {containers: «1}}", "neither true nor false"),
    ("{trespass: {containers: «True}}", "neither true nor false"),
    ("{users: «{}}", "nobody is named"),
    ("{users: {allow: «root}}", "Write [root]."),
    ("{users: {deny: [«mallory]}}", "there is no user 'mallory'"),
    ("{users: {allow_groups: [«nobodies]}}", "there is no group 'nobodies'"),
    ("{quota: «{}}", "no limit is given"),
    ("{quota: «{gpu_hours: 100h}}", "belong together"),
    ("{quota: {devices: «4x}}", "not a whole number"),
    ("{quota: {devices: 4, shared_by: [«noone]}}", "there is no group 'noone'"),
    ("{age: «{}}", "no age is given"),
    ("{age: {run_time_above: «72}}", UNIT),
    ("{health: «{}}", "no condition is given"),
    ("{command: «{}}", "no program is named"),
    ("{command: «{executables: [python]}}", "is no path"),
    ("{all: «{idle: {below: 5%}}}", "must be a list"),
    ("{all: «[]}", "the list is empty"),
    ("{all: [{idle: {below: 5%}}, {«any: [{idle: {below: 5%}}]}]}", "is no rule"),
    ("«{all: [{idle: {below: 5%}}], idle: {below: 5%}}", "here are 2"),
    ("{any: [«idle]}", "must have keys"),
    ("{expression: {expr: «'__import__(\"os\")'}}", ""),
    ("{expression: {expr: «'memory_used >'}}", ""),
]

STEPS = [
    ("«warn", "Write [warn]."),
    ("«[]", "the list is empty"),
    ("[«warm]", "Did you mean 'warn'?"),
    ("[«Warn]", "Did you mean 'warn'?"),
    ("[«exec]", "is no action"),
    ("[«'']", "the value is empty"),
    ("[«[warn]]", "must have keys"),
    ("[«{after: 5m}]", "the key 'do' is missing"),
    ("[«{warn: {}}]", "the key 'do' is missing"),
    ("[{do: «warm}]", "Did you mean 'warn'?"),
    ("[{do: «SIGKILL}]", "Did you mean 'kill'?"),
    ("[{do: «suspend}]", "Did you mean 'pause'?"),
    ("[«notify: ops]", "Add do: notify"),
    ("[{do: «[warn]}]", "must be one value"),
    ("[{do: warn, after: «5}]", UNIT),
    ("[{do: warn, «affter: 5m}]", "Did you mean 'after'?"),
    ("[{do: warn, «to: ops}]", "is no key of 'warn'"),
    ("[{do: warn, «do: kill}]", SECOND),
    ("[«notify]", "'notify' lacks the key 'to'"),
    ("[«{do: notify}]", "'notify' lacks the key 'to'"),
    ("[{do: notify, to: «ops}]", "'ops' is no target"),
    ("[{do: checkpoint, signal: «KILL}]", "is no signal for a checkpoint"),
    ("[{do: checkpoint, signal: «9}]", "is no signal for a checkpoint"),
    ("[{do: renice, niceness: «-5}]", "is no niceness"),
    ("[{do: renice, niceness: «20}]", "is no niceness"),
    ("[«kill]", "kill without a terminate"),
    ("[warn, «{after: 1h, do: kill}]", "kill without a terminate"),
    ("[terminate, «kill]", "a job needs time to end"),
    ("[terminate, «{after: 29s, do: kill}]", "kill 29s after the terminate"),
    ("[{do: terminate, even_if_innocent: «maybe}]", "neither true nor false"),
    ("[terminate, {after: 60s, do: terminate}, «kill]", "a job needs time to end"),
]

INNOCENT = [  # rules about a state of the device, with a step that ends processes
    "temperature: {above: 85C, per: process}",
    "power: {above: 300W, per: process}",
    "forecast: {full_within: 10m, per: process}",
    "health: {problems: [lost], with_processes: true}",
]

CASES = [
    *WHOLE,
    *((document(top=text), part) for text, part in TOP),
    *((document(more=text), part) for text, part in POLICY),
    *((document(when=text), part) for text, part in WHEN),
    *((document(steps=text), part) for text, part in STEPS),
    *((document(f"{{{rule}}}", "[warn, «terminate]"), "may not be the cause") for rule in INNOCENT),
    *((document(f"{{all: [{{{rule}}}, {{unclaimed: {{}}}}]}}", "[«pause]"), "may not be") for rule in INNOCENT),
]


@pytest.mark.parametrize(("text", "part"), CASES, ids=range(len(CASES)))
def test_a_fault_is_found_at_its_place_and_with_its_reason(text, part):
    plain, places = marked(text)
    file = read(plain)

    assert {(fault.line, fault.column) for fault in file.faults} == places
    assert part in " ".join(f"{fault.text} {fault.hint}" for fault in file.faults)
    assert file.policies == ()


def test_all_faults_are_found_in_one_go():
    plain, places = marked(
        "version: «2\n«mod: enforce\npolicies:\n"
        "  - {name: «A, when: {idle: {below: «5, «x: 1}}, for: «2, steps: [«kil]}\n"
        "  - {name: b, when: «{}, except: {users: [«nobody-here]}, steps: [warn]}\n"
        "  - {name: c, when: {unclaimed: {}}, steps: [«kill]}\n"
        "  - {name: c, when: {unclaimed: {}}, steps: [{do: notify, to: «opps}]}\n"
    )

    assert {(fault.line, fault.column) for fault in read(plain).faults} - places == {(7, 12)}  # and the second c


def test_bytes_that_are_not_utf_8_are_refused_at_their_place():
    [fault] = read(b"version: 1\n# caf\xe9\n").faults

    assert (fault.line, fault.column) == (2, 6)
    assert "0xe9 is not UTF-8" in fault.text


def test_more_than_64_kib_are_refused():
    [fault] = read(document() + "#" * 65536).faults

    assert "64 KiB" in fault.text


def test_a_fault_shows_the_line_with_a_caret_and_what_was_meant():
    [fault] = read(document(more="fro: 2h")).faults

    assert fault.lines("/etc/p.yaml") == [
        "/etc/p.yaml:5:5: 'fro' is no key of 'policies'.",
        "      fro: 2h",
        "      ^",
        "  Did you mean 'for'?",
    ]


def test_the_caret_stands_under_the_place_behind_wide_characters():
    [fault] = read(document(more="only: {users: [张三, alcie]}")).faults[1:]

    _, line, caret, *_ = fault.lines("p")
    assert len(caret) - 1 == line.index("alcie") + 2  # two characters of two columns


def test_a_long_nest_of_brackets_is_refused_at_once():
    assert len(read("[" * 60000).faults) == 1
