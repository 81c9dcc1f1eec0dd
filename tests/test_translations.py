"""The commands in Chinese: help, messages and errors; and that what programs read stays English."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest
import translations
from babel.messages.catalog import Catalog
from nodes import a_user
from sources import ROOT, module_name, modules

from gpuguard.enforcement.terminals import NO_TERMINAL
from gpuguard.locale import LANGUAGES, language_of_user, use_english, use_language_of_user
from gpuguard.locale.messages import sentence
from gpuguard.notify.templates import deed_text
from gpuguard.sanitize import display_width
from gpuguard.views.text import wrapped

CHINESE = {"LANG": "zh_CN.UTF-8", "LANGUAGE": "zh_CN:en"}


def ran(tmp_path, *words: str, language: Mapping[str, str] = CHINESE) -> subprocess.CompletedProcess[str]:
    """What `gpuguard` says to a user of that language, on a simulated node."""
    place = {"GPUGUARD_SIM_DIR": str(tmp_path / "node"), "GPUGUARD_DIR": str(tmp_path / "claims"), "COLUMNS": "100"}
    place["GPUGUARD_EVENTS"] = str(tmp_path / "events.jsonl")
    unset = ("LC_ALL", "LC_MESSAGES", "LANG", "LANGUAGE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"GPUGUARD_BACKEND": "simulated", "PYTHONIOENCODING": "utf-8", **place, **language}
    command = [sys.executable, "-m", "gpuguard", *words]
    return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=60)


@pytest.fixture
def node(tmp_path):
    assert ran(tmp_path, "sim", "start", "2xH100-80GB").returncode == 0
    return tmp_path


def shadowed(source: str) -> list[str]:
    """Functions that say a message with `_` although it is a variable of theirs."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = [node for part in ast.walk(function) if isinstance(part, _SCOPES) for node in ast.walk(part)]
            own = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == "_"]
            if any(isinstance(node.ctx, ast.Store) and node not in inner for node in own):
                found += [function.name] if any(isinstance(node.ctx, ast.Load) for node in own) else []
    return found


_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)  # their variables are their own


def a_catalog(**texts: str) -> Catalog:
    catalog = Catalog(locale="zh_CN")
    for english, chinese in texts.items():
        catalog.add(english.replace("_", " "), chinese)
    return catalog


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_message_is_translated_with_its_placeholders_in_the_terms_of_the_glossary(language):
    catalog = translations.read(translations.LOCALE / language / "LC_MESSAGES" / "gpuguard.po", language)
    template = translations.extracted()

    assert len(template) > 300
    assert list(translations.problems(catalog, template)) == [], "run scripts/generate"
    assert list(translations.words_beside_the_glossary(catalog, translations.glossary())) == []
    assert translations.complaints(translations.LOCALE / language / "LC_MESSAGES" / "gpuguard.po") == []


def test_the_compiled_catalogue_is_that_of_the_sources():
    folder = translations.LOCALE / "zh_CN" / "LC_MESSAGES"
    catalog = translations.read(folder / "gpuguard.po", "zh_CN")

    assert translations.said(folder / "gpuguard.mo") == translations.texts(catalog)


def test_a_planted_fault_of_a_catalogue_is_found():
    template = a_catalog(**{"missing": "", "new": "", "{a} of {b}": "", "line\n": ""})
    catalog = a_catalog(**{"missing": "", "{a} of {b}": "{a}", "line\n": "行", "gone": "没有"})

    assert [fault.partition(":")[0] for fault in translations.problems(catalog, template)] == [
        "not in gpuguard.po", "missing", "other placeholders", "another end of the line", "no code says it",
    ]  # fmt: skip


def test_a_key_of_two_sentences_is_found():
    template, catalog = a_catalog(), a_catalog()
    for one in (template, catalog):
        one.add("it is gone", "没了", context="a.gone")
        one.add("it is over", "没了", context="a.gone")

    assert list(translations.problems(catalog, template)) == ["two sentences have this key: a.gone"]


def test_a_message_that_was_changed_keeps_its_translation_until_somebody_has_looked_at_it():
    catalog, template = a_catalog(Wait_for_the_gate="等待大门", Gone="没了"), a_catalog(Wait_for_the_lock="", New="")

    translations.update(catalog, template)

    assert {message.id: (message.string, message.fuzzy) for message in catalog if message.id} == {
        "Wait for the lock": ("等待大门", True),
        "New": ("", False),
    }
    assert list(translations.problems(catalog, template)) == ["fuzzy: Wait for the lock", "missing: New"]
    assert translations.texts(catalog) == {"New": ""}


def test_what_msgfmt_complains_of_is_found(tmp_path, monkeypatch):
    msgfmt = tmp_path / "msgfmt"
    msgfmt.write_text("#!/bin/sh\necho \"$4:7: a fault\" >&2; echo '3 translated messages.' >&2\n")
    msgfmt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert translations.complaints(tmp_path / "x.po") == [f"{tmp_path}/x.po:7: a fault"]


def test_a_term_that_is_not_that_of_the_glossary_is_found():
    catalog = a_catalog(an_idle_GPU="空闲的 GPU", the_idle_device="闲置的设备")

    faults = list(translations.words_beside_the_glossary(catalog, translations.glossary()))

    assert faults == ["idle is called 闲置: an idle GPU"]


def test_messages_are_found_in_sources_wherever_they_stand():
    source = 'f"{_(\'a\')}"; x(N_("b")); ngettext("c", "d", 2); format_count(number(3), "e"); _(name); str("f")'
    source += '; sentence("k", "g {x}", x=1); nsentence("l", "h", "i", 2)'

    assert list(translations.messages_of(source)) == [
        ("a", None), ("b", None), (("c", "d"), None), (("{number:,} e", "{number:,} es"), None),
        ("g {x}", "k"), ("i", "l"),
    ]  # fmt: skip


def test_a_warned_user_reads_in_chinese_what_a_policy_did_and_what_comes_next():
    facts = {"policy": "hogs", "harm_action": "terminate", "harm_unix_seconds": 1795759200}
    found = sentence(
        "memory.above", "uses {size} of {gpu}, {limit} is allowed", size="4.0GiB", gpu="GPU 0", limit="3GiB"
    )
    message = sentence("because", "{what}: {why}", what=found, why=NO_TERMINAL)
    line = {"kind": "warn", "outcome": "failed", "message": message}
    use_language_of_user(CHINESE)
    try:
        text = deed_text({**line, "facts": facts})
    finally:
        use_english()

    assert text is not None
    assert text.startswith("策略 hogs 的警告：占用 GPU 0 显存 4.0GiB，上限 3GiB") and "SIGTERM" in text


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_no_function_takes_the_underscore_for_a_variable_and_for_a_message(path):
    assert shadowed(path.read_text(encoding="utf-8")) == []


def test_a_planted_underscore_that_is_both_is_found():
    assert shadowed('def f():\n    a, _ = g()\n    return _("b")') == ["f"]
    assert shadowed('def f():\n    print([1 for _ in "ab"], lambda _: 2)\n    return _("b")') == []


@pytest.mark.parametrize(
    ("environment", "language"),
    [
        ({}, None),
        ({"LANG": "zh_CN.UTF-8"}, "zh_CN"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN"}, "zh_CN"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "de_DE.UTF-8"}, None),
        ({"LANG": "de_DE.UTF-8", "LANGUAGE": "zh_CN:en"}, "zh_CN"),
        ({"LANG": "zh_CN.UTF-8", "LANGUAGE": "en_US:zh_CN"}, None),
        ({"LC_ALL": "C", "LANGUAGE": "zh_CN"}, None),
        ({"LC_ALL": "C.UTF-8", "LANG": "zh_CN.UTF-8"}, None),
        ({"LC_ALL": "", "LANG": "zh_CN.UTF-8"}, "zh_CN"),
    ],
)
def test_the_environment_names_the_language_as_for_gettext(environment, language):
    assert language_of_user(environment) == language


def test_help_is_chinese_down_to_the_words_of_argparse(tmp_path):
    helped = ran(tmp_path, "run", "--help").stdout

    assert helped.startswith("用法：gpuguard run [选项] [--] CMD [ARG ...]\n")
    assert "显示本帮助并退出" in helped and "每块至少有这么多空闲显存" in helped
    assert max(map(display_width, helped.split("选项:")[1].splitlines())) <= 100


def test_the_list_of_commands_is_chinese(tmp_path):
    assert "在共享服务器上挑选空闲的 GPU" in ran(tmp_path, "--help").stdout


def test_a_mistake_is_explained_in_chinese(tmp_path):
    said = ran(tmp_path, "who", "--jsn")

    assert said.stderr == "gpuguard: 无法识别的参数：--jsn（是否想用 --json？）。\n参见 `gpuguard who --help`。\n"
    assert said.returncode == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "run -n 9 -- true",
            "需要 9 块 GPU，但只有 2 块。\n请改为请求 2 块。\n`gpuguard explain -n 9` 逐个说明设备。\n",
        ),
        ("run --model A100 -- true", "没有一块能满足 --model 'A100'。\n  型号为 NVIDIA H100 80GB HBM3（2 块 GPU）\n"),
        ("run --min-free 20 -- true", "'20' 没有单位：请写内存或显存大小，例如 '20GiB'"),
        ("run -- nosuchprogram", "nosuchprogram: 找不到命令。它是否已安装，并且在 PATH 中？"),
        ("release 12ab", "没有编号以 '12ab' 开头的占用。"),
        ("reserve -n 3 --for 1h", "需要 3 块 GPU，但只有 2 块"),
        ("who --backend replay:no.rec", "无法读取 no.rec：No such file or directory。"),  # the words of the worker
    ],
)
def test_what_cannot_be_had_is_explained_in_chinese(node, words, said):
    assert said in ran(node, *words.split()).stderr


def test_a_request_that_waits_is_told_in_chinese_why(node):
    with a_user(str(node / "node"), "0,1", 10 * 2**30):
        waited = ran(node, "run", "--wait", "5s", "--", "true")

    assert waited.returncode == 124
    assert "开始排队：需要 1 块 GPU：队列第 1（共 1），" in waited.stderr and "等待时间已到。当时：" in waited.stderr


def test_the_faults_of_a_policy_file_are_chinese(node):
    (node / "policy.yaml").write_text("version: 1\npolicies:\n- {name: a, wehn: {idle: {}}, steps: [warn]}\n")
    said = ran(node, "policy", "check", str(node / "policy.yaml")).stdout

    assert "'wehn' 不是 'policies' 的键。" in said and "您是指 'when' 吗？" in said and "缺少键 'when'。" in said


def test_what_a_recording_does_not_tell_is_chinese(tmp_path):
    (tmp_path / "policy.yaml").write_text("version: 1\npolicies: [{name: a, when: {unclaimed: {}}, steps: [warn]}]\n")
    (tmp_path / "day.csv").write_text("time_seconds,job,utilization_percent\n0,a,0\n60,a,0\n")
    said = ran(tmp_path, "policy", "backtest", str(tmp_path / "policy.yaml"), "--on", str(tmp_path / "day.csv")).stdout

    assert "a  unclaimed  其中没有 占用情况" in said


def test_what_is_recorded_of_a_job_stays_english(node):
    events = node / "events.jsonl"
    said = ran(
        node, "run", "--time-limit", "1s", "--", "sleep", "60", language={**CHINESE, "GPUGUARD_EVENTS": str(events)}
    )

    assert "时限已到：向任务发送 SIGTERM。" in said.stderr
    assert '"the time limit is over"' in events.read_text() and events.read_text().isascii()
    assert re.search(r"时限 +SIGTERM .* 时限已到; 进程 ", ran(node, "events").stdout)


def test_what_programs_read_stays_english(node):
    texts = [ran(node, *words, language=language) for language in (CHINESE, {}) for words in (["explain", "--json"],)]
    chinese, english = (json.loads(done.stdout) for done in texts)

    assert chinese["devices"] == english["devices"]
    assert ran(node, "completion", "bash").stdout.isascii()


def test_a_terminal_that_has_no_chinese_characters_gets_english(tmp_path):
    said = ran(tmp_path, "--help", language={**CHINESE, "PYTHONIOENCODING": "ascii"})

    assert said.stdout.startswith("usage: gpuguard COMMAND")


def test_chinese_text_is_wrapped_by_columns_and_no_line_begins_with_a_comma():
    lines = wrapped("每块至少有这么多，例如 20GiB（默认：全部）", 18)

    assert max(map(display_width, lines)) <= 18
    assert [line for line in lines if line[0] in "，。：）"] == []
    assert "".join(lines).replace(" ", "") == "每块至少有这么多，例如20GiB（默认：全部）"


def test_a_job_and_all_that_is_said_of_it_is_chinese(node):
    done = ran(node, "run", "-n", "1", "--", "true")
    told = ran(node, "events")

    assert "在 GPU 0 (SIMULATED)" not in done.stderr and "结束：退出码 0" in done.stderr
    assert re.search(r"时间 +事件 +GPU +用户 +备注\n.*占用 开始 .*\n.*释放 结束 ", told.stdout)


def test_what_a_user_wrote_stays_as_it_is(node):
    ran(node, "quarantine", "0", "--reason", "lost")
    told = ran(node, "events").stdout

    assert re.search(r"隔离 已隔离 +0 .* lost;", told) and "丢失" not in told


def test_tables_are_aligned_by_columns_of_the_terminal(node):
    head, first, *_ = ran(node, "who").stdout.splitlines()[1:]

    place = display_width(head[: head.index("状态")])
    assert display_width(first[: first.index("空闲")]) == place
    assert {"名称", "显存", "利用率", "温度", "功率"} <= set(head.split())


def test_what_a_job_leaves_in_the_log_stays_english(node):
    ran(node, "run", "-n", "1", "--", "true")
    told = json.loads(ran(node, "events", "--json").stdout)["events"]

    assert [(event["kind"], event["outcome"]) for event in told] == [("claim", "started"), ("release", "settled")]
    assert json.dumps(told, ensure_ascii=False).isascii()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["explain", "-n", "1"], ("选中", "会立即在")),
        (["doctor"], ("正常  驱动", "模拟节点：不需要驱动")),
        (["top", "--once"], ("2 块 GPU", "空闲", "没有进程")),
        (["queue"], ("队列中",)),
        (["query", "--help-query"], ("GPU 的字段", "产品的正式名称")),
        (["policy", "rules", "memory"], ("驱动未报告的显存不计入", "键：above (如 40GiB、90% 或 share，必需)")),
        (["report", "--by", "claim"], ("按占用统计的 GPU 时间", "没有占用结束")),
        (["policy", "explain", str(ROOT / "examples" / "policies" / "lab.yaml")], ("GPU 被占用", "演练：")),
    ],
)
def test_the_screens_of_the_commands_are_chinese(words, shown, node):
    text = ran(node, *words).stdout

    assert [part for part in shown if part not in text] == []
