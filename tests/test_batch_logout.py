"""What becomes of jobs at logout: what logind is told to do, and where the process runs that submits."""

import pytest

from gpuguard.batch import logout
from gpuguard.batch.logout import ENDS, NEEDS_SCOPE, STAYS, told_to_end

SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"
OWN_SYSTEMD = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('b true\nas 0\nas 1 "root"\n', True),
        ('b false\nas 0\nas 1 "root"\n', False),
        ('b true\nas 0\nas 2 "root" "alice"\n', False),
        ('b true\nas 1 "bob"\nas 0\n', False),
        ('b true\nas 1 "alice"\nas 0\n', True),
        ("", False),
    ],
)
def test_logind_says_whose_processes_it_ends(answer, expected):
    assert told_to_end(answer, "alice") is expected


@pytest.mark.parametrize("cgroup", [None, OWN_SYSTEMD, "0::/system.slice/cron.service\n"])
def test_a_process_of_no_session_needs_no_answer(cgroup, monkeypatch):
    monkeypatch.setattr(logout, "read_text", lambda path: cgroup)
    monkeypatch.setattr(logout, "_ASK", ("/nonexistent/asked",))

    assert logout.fate_at_logout() == STAYS


@pytest.mark.parametrize("program", [("no-such-program",), ("false",), ("echo", "b false")])
def test_without_an_answer_of_logind_processes_stay(program, monkeypatch):
    monkeypatch.setattr(logout, "read_text", lambda path: SESSION)
    monkeypatch.setattr(logout, "_ASK", program)

    assert logout.fate_at_logout() == STAYS


def test_where_logind_ends_them_a_user_who_lingers_needs_a_scope(tmp_path, monkeypatch):
    monkeypatch.setattr(logout, "read_text", lambda path: SESSION)
    monkeypatch.setattr(logout, "_ASK", ("sh", "-c", 'printf "b true\\nas 0\\nas 0\\n"'))
    monkeypatch.setattr(logout, "_LINGER", str(tmp_path))
    assert logout.fate_at_logout() == ENDS
    (tmp_path / logout.user_name(logout.os.geteuid())).touch()

    assert logout.fate_at_logout() == NEEDS_SCOPE
