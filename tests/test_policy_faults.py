"""Policy files that are refused, each with the place and the reason.  A ``«`` marks where the fault must be found."""

import pytest
from policies import document, marked, read

WHOLE = [  # texts of whole files
    ("«", "the file is empty"),
    ("«# only a comment\n", "the file is empty"),
    ("---\n«", "the value is missing"),
    ("«policies", "must have keys"),
    ("«[]", "must have keys"),
    ("«- version: 1\n", "must have keys"),
    ("«{}", "lacks the key"),
    ("«version: 1\n", "lacks the key 'policies'"),
    ("«policies: [{name: a, when: {unclaimed: {}}, steps: [log]}]\n", "Add version: 1"),
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

TOP = {  # lines of the file
    "Did you mean 'enforce'?": ("mode: «enforc",),
    "no choice": ("mode: «Enforce", "mode: «yes", "mode: «~", "messages: {«fr: {subject: a, body: b}}"),
    "the value is missing": ("mode:« ",),
    "the value is empty": ("mode: «''",),
    "must be one value": ("mode: «[enforce]", "mode: «{enforce: true}"),
    "a second time": (
        "mode: observe\n«mode: enforce", "mode: observe\n«'mode': enforce", "«version: 1",
        "notify: {ops: {email: a@example.org}, «ops: {email: b@example.org}}",
    ),
    "Did you mean 'mode'?": ("«Mode: enforce", "«modes: enforce"),
    "is no key of": ("«enforce: true", "notify: {ops: {email: {to: a@example.org, password: {«text: secret}}}}"),
    "must be a name": ("? «[mode]\n: enforce", "? «{mode: a}\n: enforce"),
    "not YAML": ("«: enforce",),
    "an anchor (&m)": ("mode: «&m enforce",),
    "a tag (!!str)": ("mode: «!!str enforce",),
    "a tag (!!python/object/apply:os.system)": ("mode: «!!python/object/apply:os.system enforce",),
    "a tag (!)": ("mode: «! enforce",),
    "a tag (!secret)": ("mode: «!secret enforce",),
    "a merge key": ("«<<: {mode: enforce}",),
    "goes on in the next line": ("mode: «enf\n  orce",),
    "must have keys": ("notify: «[ops]", "notify: {ops: «ops@example.org}"),
    "is no key of 'protect'": ("protect: {«paths: [/opt]}",),
    "no user or program is named": ("protect: «{}",),
    "there is no user 'alcie'": ("protect: {users: [«alcie]}",),
    "there is no group 'staf'": ("protect: {groups: [«staf]}",),
    "write it in full": ("protect: {executables: [«python3]}",),
    "exactly one way to send is needed": ("notify: {ops: «{}}",),
    "Did you mean 'email'?": ("notify: {ops: {«mail: ops@example.org}}",),
    "here are 2": ("notify: {ops: «{email: a@example.org, hook: {command: [/bin/true]}}}",),
    "is no name": ("notify: {«Ops: {email: ops@example.org}}",),
    "not a whole number": (
        "notify: {ops: {email: {to: a@example.org, port: «0x19}}}",
        "notify: {ops: {email: {to: a@example.org, port: «1_000}}}",
    ),
    "has no unit": ("notify: {ops: {email: {to: a@example.org, timeout: «10}}}", "interval: {shortest: «5}"),
    "lacks the key 'to'": ("notify: {ops: {email: «{server: mail.example.org}}}",),
    "begins with a path": ("notify: {ops: {hook: «{command: [tell]}}}",),
    "must be a list": ("notify: {ops: {hook: {command: «/bin/true --now}}}",),
    "Did you mean 'subject'?": ("messages: {en: {«subjcet: a}}",),
    "out of range": ("interval: {shortest: «0s}", "interval: {longest: «2h}", "desktop_memory: «9GiB"),
    "exchange them": ("interval: «{shortest: 20s, longest: 10s}",),
    "Known: shortest, longest.": ("interval: «10s",),
}  # fmt: skip

POLICY = {  # lines of a policy
    "has no unit": (
        "for: «2", "for: «010", "start_grace: «30", "claimed_above: «80", "claimed_above: «0.8", "cooldown: «15",
    ),
    "is not a duration": (
        "for: «1:30", "for: «22:00", "for: «1e3", "for: «.inf", "for: «-5m", "for: «2 hours", "for: «2H",
        "for: «1h 30m", "for: «null", "for: «no", "cooldown: «15min",
    ),
    "must be one value": ("for: «[2h]", "only: {users: [alice, «[bob]]}", "hours: «[22:00-07:00]"),
    "a second time": ("for: 2h\n«for: 3h", "«name: q"),
    "an alias (*d)": ("for: «*d",),
    "Did you mean 'for'?": ("«form: 2h",),
    "Did you mean 'steps'?": ("«then: [warn]", "«actions: [warn]"),
    "Did you mean 'when'?": ("«if: {idle: {below: 5%}}", "«condition: {idle: {below: 5%}}"),
    "Did you mean 'start_grace'?": ("«startgrace: 2h",),
    "is no key of": ("«action: terminate", "only: {«until: 2026-12-24, users: [alice]}"),
    "must have keys": ("only: «alice", "only: «[alice]", "except: [«alice]", "at_most: «3"),
    "nothing is named": ("only: «{}", "except: «{until: 2026-12-24}", "except: [{users: [alice]}, «{}]"),
    "Write [alice].": ("only: {users: «alice}",),
    "Write [no].": ("only: {users: «no}", "except: {users: «no}"),
    "the list is empty": ("only: {users: «[]}",),
    "there is no user '*'": ("only: {users: [«'*']}",),
    "there is no user 'all'": ("only: {users: [«all]}",),
    "there is no user '0777'": ("only: {users: [«0777]}",),
    "is no uid": ("only: {users: [«4294967295]}",),
    "there is no group '50'": ("only: {groups: [«50]}",),
    "is no GPU": (
        "only: {devices: [«card0]}", "only: {devices: [«00]}", "only: {devices: [«-1]}", "only: {devices: [«GPU-]}",
        "only: {devices: [«gpu0]}",
    ),
    "no choice": ("only: {kinds: [«notebook]}", "days: [«Monday]", "days: [«1]", "mode: «on", "mode: «true"),
    "Did you mean 'batch'?": ("only: {kinds: [«Batch]}",),
    "Did you mean 'devices'?": ("only: {«gpus: [0]}",),
    "Write [A100*].": ("only: {models: «A100*}",),
    "Did you mean 'users'?": ("only: {«user: [alice]}", "at_most: {«user: 3}"),
    "is no date": (
        "except: {users: [alice], until: «2026-13-24}", "except: {users: [alice], until: «2026-02-30}",
        "except: {users: [alice], until: «24.12.2026}", "except: {users: [alice], until: «20261224}",
        "except: {users: [alice], until: «2026-12-24 18:00}",
    ),
    "not a whole number from 1 on": (
        "devices_at_least: «0", "devices_at_least: «1.5", "devices_at_least: «two", "at_most: {users: «0}",
        "at_most: {users: «010}", "at_most: {users: «1e9}",
    ),
    "are no hours": ("hours: «22:00", "hours: «22-7", "hours: «9:00-17:00", "hours: «08:00-08:60"),
    "00:00 to 24:00": ("hours: «22:00-25:00", "hours: «24:00-07:00"),
    "begins when it ends": ("hours: «08:00-08:00",),
    "Write [mon].": ("days: «mon",),
    "Did you mean 'mon'?": ("days: [«Mon]",),
    "named twice": ("days: «[mon, mon]",),
    "is not a percentage": ("claimed_above: «.nan", "claimed_above: «-5%"),
    "more than 100%": ("claimed_above: «120%",),
}  # fmt: skip

WHEN = {
    "must have keys": ("«idle", "{idle: «5%}", "{unclaimed: «[]}", "{any: [«idle]}"),
    "exactly one rule is needed, and here are 0": ("«{}",),
    "here are 2": ("«{idle: {below: 5%}, memory: {above: 1GiB}}", "«{all: [{idle: {below: 5%}}], idle: {below: 5%}}"),
    "Did you mean 'idle'?": ("{«idel: {below: 5%}}",),
    "is no rule": ("{«gpu_idle: {below: 5%}}", "{all: [{idle: {below: 5%}}, {«any: [{idle: {below: 5%}}]}]}"),
    "Write {} when it needs no keys.": ("{idle:« }",),
    "lacks the key 'below'": ("{idle: «{}}", "{idle: «{cpu_below: 5%}}"),
    "has no unit": (
        "{idle: {below: «5}}", "{idle: {below: «0.05}}", "{idle: {below: 5%, memory_above: «1}}",
        "{memory: {above: «40}}", "{temperature: {above: «85}}", "{power: {above: «300}}",
        "{unclaimed: {min_memory: «1024}}", "{age: {run_time_above: «72}}",
    ),
    "is not a percentage": ("{idle: {below: «5.}}", "{idle: {below: «five}}"),
    "like '90%'": ("{memory: {above: «0.9}}", "{power: {above: «0.9}}", "{host_memory: {above: «0.5}}"),
    "more than 100%": ("{idle: {below: «105%}}",),
    "Did you mean 'below'?": ("{idle: {below: 5%, «bellow: 6%}}",),
    "no choice": ("{idle: {below: 5%, window: «moving}}", "{memory: {above: 40GiB, per: «job}}"),
    "over": ("{idle: «{below: 5%, window: sliding}}", "{idle: «{below: 5%, over: 2h}}"),
    "not a rate": ("{idle: {below: 5%, network_below: «1MB}}", "{memory_growth: {above: «1GiB}}"),
    "is not a memory size": (
        "{memory: {above: «40Q}}", "{memory: {above: «40gb}}", "{memory: {above: «1e10}}", "{memory: {above: «.inf}}",
    ),
    "is not a temperature": ("{temperature: {above: «85F}}", "{temperature: {above: «-1C}}"),
    "exactly one of above and below": ("{utilization: «{}}", "{utilization: «{above: 90%, below: 95%}}"),
    "not a whole number": (
        "{processes: {above: «2.5}}", "{processes: {above: «-1}}", "{processes: {above: «02}}",
        "{quota: {devices: «4x}}",
    ),
    "neither true nor false": (
        "{trespass: {containers: «yes}}", "{trespass: {containers: «1}}", "{trespass: {containers: «True}}",
    ),
    "no user is named": ("{users: «{}}",),
    "Write [root].": ("{users: {allow: «root}}",),
    "there is no user 'mallory'": ("{users: {deny: [«mallory]}}",),
    "there is no group 'nobodies'": ("{users: {allow_groups: [«nobodies]}}",),
    "no limit is given": ("{quota: «{}}",),
    "belong together": ("{quota: «{gpu_hours: 100h}}",),
    "there is no group 'noone'": ("{quota: {devices: 4, shared_by: [«noone]}}",),
    "no age is given": ("{age: «{}}",),
    "no condition is given": ("{health: «{}}",),
    "no program is named": ("{command: «{}}",),
    "is no path": ("{command: {executables: [«python]}}",),
    "must be a list": ("{all: «{idle: {below: 5%}}}",),
    "": ("{expression: {expr: «'__import__(\"os\")'}}", "{expression: {expr: «'memory_used >'}}"),
}  # fmt: skip

STEPS = {
    "Write [warn].": ("«warn",),
    "the list is empty": ("«[]",),
    "Did you mean 'warn'?": ("[«warm]", "[«Warn]", "[{do: «warm}]"),
    "must have keys": ("[«[warn]]",),
    "the key 'do' is missing": ("[«{after: 5m}]", "[«{warn: {}}]"),
    "Did you mean 'kill'?": ("[{do: «SIGKILL}]",),
    "Did you mean 'pause'?": ("[{do: «suspend}]",),
    "Add do: notify": ("[«notify: ops]",),
    "is no key of 'warn'": ("[{do: warn, «to: ops}]",),
    "'notify' lacks the key 'to'": ("[«notify]", "[«{do: notify}]"),
    "'ops' is no target": ("[{do: notify, to: «ops}]",),
    "is no signal for a checkpoint": ("[{do: checkpoint, signal: «KILL}]", "[{do: checkpoint, signal: «9}]"),
    "is no niceness": ("[{do: renice, niceness: «-5}]", "[{do: renice, niceness: «20}]"),
    "kill without a terminate": ("[«kill]", "[warn, «{after: 1h, do: kill}]"),
    "a job needs time to end": ("[terminate, «kill]", "[terminate, {after: 60s, do: terminate}, «kill]"),
    "kill 29s after the terminate": ("[terminate, «{after: 29s, do: kill}]",),
    "neither true nor false": ("[{do: terminate, even_if_innocent: «maybe}]",),
}  # fmt: skip

INNOCENT = [  # rules about a state of the device, with a step that ends processes
    "temperature: {above: 85C, per: process}",
    "power: {above: 300W, per: process}",
    "forecast: {full_within: 10m, per: process}",
    "health: {problems: [lost], with_processes: true}",
]

CASES = [
    *WHOLE,
    *((document(top=text), part) for part, texts in TOP.items() for text in texts),
    *((document(more=text), part) for part, texts in POLICY.items() for text in texts),
    *((document(when=text), part) for part, texts in WHEN.items() for text in texts),
    *((document(steps=text), part) for part, texts in STEPS.items() for text in texts),
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


ALL_AT_ONCE = {
    "keys and values": """
version: «2
«mod: enforce
policies:
  - {name: «A, when: {idle: {below: «5, «x: 1}}, for: «2, steps: [«kil]}
  - {name: b, when: «{}, except: {users: [«nobody-here]}, steps: [warn]}
  - {name: c, when: {unclaimed: {}}, steps: [«kill]}
""",
    "a name for the second time": """
version: 1
policies:
  - {name: c, when: «{}, steps: [warn]}
  - {name: «c, when: {unclaimed: {}}, for: «2, steps: [warn]}
  - {name: «c, when: {unclaimed: {}}, steps: [«kil]}
""",
    "a target that is unknown": """
version: 1
mode: «enforc
notify: {ops: {email: «[]}, pager: {hook: {command: [/bin/true]}}, «Desk: {email: a@b.org}, mine: {email: a@b.org}}
policies:
  - {name: a, when: {unclaimed: {}}, for: «2, steps: [{do: notify, to: «opps}, {do: notify, to: ops}]}
  - {name: b, when: «{}, steps: [«kil, {do: notify, to: «opps}, {do: run_hook, hook: «mine, after: «2}]}
  - {name: c, when: {unclaimed: {}}, steps: [{do: run_hook, hook: pager}, {do: notify, to: «desk}]}
""",
    "steps that do not fit": """
version: 1
policies:
  - {name: a, when: {unclaimed: {}}, for: «2, steps: [terminate, «{do: kill, after: 5s}]}
  - {name: b, when: {temperature: {above: 80C, per: process}}, cooldown: «2, steps: [«terminate]}
  - {name: c, when: «{}, days: «[mon, mon], steps: [warn]}
""",
}


@pytest.mark.parametrize("text", ALL_AT_ONCE.values(), ids=ALL_AT_ONCE)
def test_all_faults_are_found_in_one_go(text):
    plain, places = marked(text)

    assert {(fault.line, fault.column) for fault in read(plain).faults} == places


def test_bytes_that_are_not_utf_8_are_refused_at_their_place():
    [fault] = read(b"version: 1\n# caf\xe9\n").faults

    assert (fault.line, fault.column) == (2, 6)
    assert "0xe9 is not UTF-8" in fault.text


@pytest.mark.parametrize(("content", "why"), [(document() + "#" * 65536, "64 KiB"), ("[" * 60000, "16 levels")])
def test_what_is_too_long_or_too_deep_is_one_fault(content, why):
    [fault] = read(content).faults

    assert why in fault.text


def test_the_caret_stands_under_the_place_behind_wide_characters():
    [fault] = read(document(more="only: {users: [张三, alcie]}")).faults[1:]

    _, line, caret, *_ = fault.lines("p")
    assert len(caret) - 1 == line.index("alcie") + 2  # two characters of two columns
