"""Sentences that are written in English where no user reads them, and shown in the language of the user later.

They come from the audit log, from records, from the worker that reads the GPUs, from the daemon and from other hosts.
locale.translated() finds them again, and so does the page of `gpuguard web`: by the first line that fits.  What stands
in a place may be such a sentence, too, but not in those of NAMES, nor where it is one word, which may be a user's name.
In {gpu} it is a GPU or a MIG instance, in {number} digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache

SENTENCES = (
    # Why a request waits, of `gpuguard queue` on other hosts, the daemon's answers and the page.
    "number {number} of {count} in the queue, {text}",
    "with a --time-limit that ends before, it could start now",
    "with a --time-limit of at most {limit} it could start now",
    "starts now",
    "starts in about {seconds}, {why}",
    "starts in about {seconds}",
    "starts in a moment",
    "start unknown: {why}",
    "not queued yet: {after}",
    "waits for {number} earlier requests of its user",
    "waits until process {pid} has ended",
    "waits until {user}'s claim {id} has ended",
    "held back: it would delay {request}",
    "{user}'s request for {count}, which came before",
    "{user}'s request for {count}, which has waited for {waited}",
    "the reservation of {user} {time}",
    "reservation {delayed}",
    "from {time}",
    "until {time}",
    "no GPUs for it as things are",
    "too far behind for a plan",
    "{freed}: time limit of {user}'s job",
    "{freed}, if {user}'s job takes as long as their earlier ones",
    "when {gpu} is free",
    "after the reservation of {user} {time}",
    "after {user}'s request",
    "{user}'s request before it has no time limit",
    "the jobs of {users} have no time limit",
    "the job of {user} has no time limit",
    "a job is over its time",
    "a GPU is in use without a claim",
    "a GPU is not free, though it has no claim",
    "kept for {user}'s reservation {time}",
    "it is not your turn: {why}",
    # What `select` and `run` of another host refuse.
    "wanted {count}, but none is free now.",
    "wanted {count}, but only {free} is free now.",
    "wanted {count}, but only {free} are free now.",
    "wanted {count}, but none exists.",
    "wanted {count}, but only {there} exists.",
    "wanted {count}, but only {there} exist.",
    "{number} GPUs",
    "{number} GPU",
    # Restrictions, and the names of GPUs.
    "MIG instance {label}",
    "quarantined by {by} until {time}: {reason}",
    "quarantined by {by} until {time}",
    "quarantined by {by}: {reason}",
    "quarantined by {by}",
    "new claims of {user} are denied by {by} until {time}: {reason}",
    "new claims of {user} are denied by {by} until {time}",
    "new claims of {user} are denied by {by}: {reason}",
    "new claims of {user} are denied by {by}",
    "the administrator",
    "the daemon",
    "did not claim {count} within {time}",
    "gave {count} back that no process has held",
    # The state of a GPU.
    "the claims cannot be read",
    "memory is in use, by processes that are not listed",
    "the process list makes no sense",
    "no process list: judged by its memory in use",
    "no process list",
    "its compute mode is 'prohibited'",
    "divided (MIG), and without an instance",
    "lost",
    "unresponsive",
    "lost, {more}",
    "unresponsive, {more}",
    "reset required",
    "reset required, {more}",
    "row remap pending",
    "row remap pending, {more}",
    "row remap failed",
    "row remap failed, {more}",
    "page retirement pending",
    "page retirement pending, {more}",
    "the NVLink fabric has an unhealthy route",
    "another GPU has the same uuid",
    "cannot be opened: {reason}",
    "the driver recommends: {action}",
    # What a rule of a policy has found.
    "uses {size} of {gpu}, its share of {share} is allowed",
    "uses {size} of {gpu}, {limit} of {total} is allowed",
    "uses {size} of {gpu}, {limit} is allowed",
    "uses {size} of a GPU that {user} has claimed, without a claim, and less than {limit} would be allowed",
    "uses {size} of a GPU that {user} has claimed, without a claim",
    "uses {size} of a GPU without a claim, and less than {limit} would be allowed",
    "uses {size} of a GPU without a claim",
    "uses {size} of a GPU that the scheduler has given to {user}",
    "uses {size} of a GPU that {user} has claimed",
    "no user",
    "other users",
    "uses {size} of the machine's memory, {limit} of {total} is allowed",
    "uses {size} of the machine's memory, {limit} is allowed",
    "uses {used} of {cores} cores, {limit} of them is allowed",
    "{user} uses {size}, {share} of the memory of all GPUs, {limit} is allowed",
    "runs {program} and uses {size}",
    "{user} is denied and uses {size}",
    "{user} is in the group {group}, which is denied, and uses {size}",
    "{user} is not among those who are allowed and uses {size}",
    "{user} is denied and has a claim",
    "{user} is in the group {group}, which is denied, and has a claim",
    "{user} is not among those who are allowed and has a claim",
    "memory on {gpu} grows by {grown} in {time} (trend over {span}), {limit} is allowed",
    (
        "memory of {gpu} is full in about {time}: {free} is free and {rate} more is used each minute (confidence "
        "{confidence})"
    ),
    "less than {limit} is not enough",
    "{gpu} has {temperature}, {limit} is allowed",
    "{gpu} draws {power}, {limit} of {total} is allowed",
    "{gpu} draws {power}, {limit} is allowed",
    "utilization of {gpu} is {share}, at most {limit} is allowed",
    "utilization of {gpu} is {share}, at least {limit} is expected",
    "{gpu} is idle: utilization {share}, at most {limit} is idle, while {size} is held, for {time}",
    "{gpu} is idle: utilization {share}, at most {limit} is idle, while {size} is held",
    "{gpu} is idle: utilization {share}, at most {limit} is idle, for {time}",
    "{gpu} is idle: utilization {share}, at most {limit} is idle",
    "{gpu} was idle in {share} of the last {span} (utilization at most {below}), {limit} is too much",
    "{count} processes compute on {gpu}, {limit} processes are allowed",
    "{user} has {count} GPUs, the limit is {limit}",
    "{user} has {count} claims, the limit is {limit}",
    "{user} had {hours} GPU-hours in {time}, the limit is {limit}",
    "has run for {time}, {limit} are allowed",
    "held for {time}, the last {span} without a process",
    "slowed down by {reasons}",
    "{count} corrected memory errors, {limit} are allowed",
    "{count} uncorrected memory errors, {limit} are allowed",
    "{count} retired pages, {limit} are allowed",
    "{count} remapped rows, {limit} are allowed",
    "{facts}: true is {condition}",
    "{why} (and the like on {count} more GPU)",
    "{why} (and the like on {count} more GPUs)",
    "asked for by {user}",
    # What became of the steps of a policy.
    "the condition holds no more, its steps are cancelled",
    "the condition holds no more",
    "the policy is gone, its steps are cancelled",
    "the policy was changed, its steps are cancelled",
    "{fact}: the time starts anew",
    "{field} could not be read, {reason}",
    "{time}s since the last sample: all durations start anew",
    "{time}s since the last sample: they count for no duration",
    "the machine was suspended: all durations start anew",
    "the sample is the same as before: it shows nothing new",
    (
        "{users} users with {processes} processes would be acted on at once, more than {most_users} users or "
        "{most_processes} processes: none is"
    ),
    (
        "{users} users with {processes} processes would be acted on at once, more than {most_users} users or "
        "{most_processes} processes: only {count} are, the oldest breach first"
    ),
    (
        "{users} users would be acted on at once, more than {most_users}, and the finding rests on readings, which can "
        "go wrong for everybody: no user is ({user})"
    ),
    (
        "{users} users would be acted on at once, more than {most_users}, and the finding rests on claims that are "
        "missing, which can go wrong for everybody: no user is ({user})"
    ),
    "as many as the policy allows are acted on at once: it follows when their effect is seen",
    "its turn comes when the condition has held for another {time}",
    "a step of {policy} on the same GPU has not shown its effect yet",
    "{action} is passed over: no process is meant",
    "{action} is passed over: no process is meant (a claim is taken back by `release`)",
    "release is passed over: no claim is meant",
    "release is passed over: processes are meant",
    "the GPU is missing from the sample",
    "the claim is missing from the sample",
    "process {pid} is missing from the sample",
    "the owner of the claim is unknown",
    "the user is unknown",
    "the identity of process {pid} is not known",
    "outside `only`",
    "kept for another {time}",
    "of unknown age, innocent for the first {time}",
    "{age}, innocent for the first {time}",
    "{share} of the GPUs are claimed, not above {limit}",
    "on fewer than {count} GPUs of the same user",
    "the driver gives no list of processes",
    "the list of processes is not plausible",
    # Why a step was not done.
    "the last step is not long ago",
    "the sample is a recording, of another time or machine",
    "{pid} is no pid",
    "who it is is not known",
    "the sample is from the future",
    "the sample is {time} old",
    "it is on no GPU",
    "it is not on the GPU any more",
    "it cannot be held: {error}",
    "the driver's pids are those of another pid namespace",
    "/proc does not show it",
    "its pid belongs to another process now",
    "it may have started after the sample",
    "the driver gave no newer list",
    "the driver's list of processes cannot be believed",
    "the driver does not list it on that GPU",
    "whether it has the driver open cannot be seen",
    "it does not have the driver open: the driver's list cannot be right",
    "it is a {kind} process: only compute processes are signalled",
    "an MPS server shares this GPU: its other clients would suffer",
    "it is no more than a desktop there",
    "what it draws belongs to the session at the machine's own screen",
    "an MPS server of root's shares this GPU: its clients of other users would suffer",
    "its owner is not the one that was judged",
    "the name of uid {uid} is not known",
    "whose it is cannot be read",
    "uid {uid} is the system's",
    "uid {uid} is protected",
    "its program cannot be read",
    "{program} belongs to the system",
    "{program} is protected",
    "it belongs to {user}: only root signals processes of others",
    "gpuguard may not signal processes of others: it is not root, and runs without CAP_KILL",
    "gpuguard itself stands on it",
    "it is a part of gpuguard",
    "it is in gpuguard's process group",
    "it is {kind}, and has {time} more",
    "being debugged",
    "a notebook",
    "on a terminal",
    "perhaps interactive",
    "signal {number} is none for a checkpoint",
    "it has no way to answer {name}: most programs end of it",
    "it does not hold what it held just now",
    "pid {pid} computes under it",
    "pid {pid} computes under it: end it first.",
    "memory is in use, though no process is listed",
    "the condition does not hold any more",
    "no message has reached the user",
    # What a policy file says and the daemon does not do.
    "the policy file has faults, and there is no earlier one: nothing is guarded",
    "the policy file has faults; policies of the last good one: {whole} in force, {changed} that only warn",
    # What came of a step that ends a process.
    "ended within {time}, and its memory is back",
    "ended within {time}",
    "ended, but its memory is still in use after {time}",
    "still there after {time}",
    # Of pauses: why one has ended, and what became of the process.
    "the policy {policy} is not in force any more",
    "the guard was started again",
    "the guard ends",
    "whether its condition holds has been unknown for long",
    "let go on by {user}",
    "it is stopped already",
    "gpuguard has not paused it",
    "it goes on",
    "try again",
    "it had ended",
    "another hand has stopped it or let it go on",
    "a debugger has it",
    "another signal stops it",
    "another hand let it go on meanwhile, and stopped it",
    "another hand let it go on",
    "it has been asked to end",
    "the driver cannot be asked again: {error}",
    "no claim is meant",
    "no process is meant",
    "no GPU is meant",
    "no user in particular is meant",
    "there is no receiver",
    "processes use it: they are ended by `terminate`",
    "there is no directory of claims",
    "there is no directory of claims to write it into",
    "nothing could be written down, so nothing was done",
    "it has ended",
    "it had ended before",
    "its job has ended",
    "it was done before",
    "more than half of the GPUs would be out of service: ask an administrator",
    "its line in the audit log took {seconds} to write: what was decided before is too old",
    "it outlived SIGKILL: no further signal can help",
    "a process on this GPU outlived SIGKILL: the GPU is left alone",
    "it outlived SIGKILL by {time}: no further signal can help",
    "it outlived SIGKILL by {time}: its GPUs need a reset, and are left alone",
    "pid {pid} outlived SIGKILL: the GPU needs a reset",
    "the process is gone from the GPU, and its memory is back",
    "pid {pid} outlived SIGKILL by {time}: the GPU needs a reset",
    "it was killed before: no further signal can help",
    "{count} jobs signalled in one minute are the most",
    (
        "{count} jobs ended in one hour are the most, and the {left} that are left are for other users: of this one "
        "{own} were ended"
    ),
    "{count} jobs ended in one hour are the most",
    "pid {pid} on this GPU comes first",
    "the effect on pid {pid} on this GPU is not seen yet",
    "{action} was done {time} ago",
    "it was not asked to end first: put terminate before kill",
    "it was asked to end {time} ago, and has {limit} to do it",
    "the same program was ended {count} times within the hour, and was started again each time",
    "it belongs to no Slurm job",
    "job {job} is not the one of uid {uid}",
    "Slurm says nothing certain about job {job}: {reason}",
    "job {job} does not run",
    "it does not answer",
    "scancel fails ({reason}): try `scancel {job}` by hand",
    "Slurm cannot be called, or does not answer in {seconds} s: try `scancel {job}` by hand",
    "the kernel does not lend its open files: the daemon's unit must permit pidfd_getfd, see docs/daemon.md",
    "no terminal",
    "the terminal belongs to another user",
    "the terminal takes no messages",
    "the terminal does not read",
    # Of jobs and claims.
    "the time limit is over",
    "the grace is over",
    "the time limit is over in {time}",
    "stopped {request}",
    "by {by} at {time}: {why}",
    "by {by} at {time}",
    "the job {why} (--memory): its neighbours can run out of memory.  --memory-limit ends such a job.",
    "{why} (--{limit})",
    "{user} (pid {pid}) computes on {gpu} too, which you have claimed.",
    "GPU {device} with {user} (pid {pid})",
    "GPU {device} without a claim (pid {pid})",
    (
        "the job computes on {gpu} (pid {pid}), which it has not claimed: leave CUDA_VISIBLE_DEVICES as gpuguard sets "
        "it, and count GPUs from 0 in the job."
    ),
    "ended by policy {policy} ({why})",
    "the claim {id} was released {request}.",
    "the lock file {path} was removed or replaced.",
    "{path} is locked by another process: the job, or a process in it, had unlocked it.",
    (
        "the GPU is locked, and no process has its lock file open: the open file lies in a message that no process "
        "receives (descriptors in flight over a unix socket), in a mapping or in an io_uring.  It counts as no "
        "claim.  The lock is free when that process ends; /proc/net/unix lists all unix sockets."
    ),
    (
        "the GPU is locked, and no process has its lock file open: the open file lies in a message that no process "
        "receives (descriptors in flight over a unix socket), in a mapping or in an io_uring.  It counts as no "
        "claim.  The lock is free when the process ends that keeps it, which may be: {processes}."
    ),
    "a process of {user}, whose open files cannot be read to the end in time",
    (
        "the lock of the GPU is held by processes of {users} together, and no record says whose it is.  It counts as "
        "no claim, and is free when all of them have ended"
    ),
    "no trespasser on the claim of {user}: the process used the GPU before the claim came, or may have",
    "records and tickets have little room left: {room}",
    "{process} keeps {path} locked, so every start is delayed",
    "the driver lists a process that has ended: a child of it may still hold the GPU",
    "whether it is used cannot be seen: {unknown}",
    "pid {pid} ({command}) computes for {time} with {memory}",
    "pid {pid} ({command}) computes for {time}",
    "pid {pid} ({command}) computes",
    "pid {pid} computes for {time} with {memory}",
    "pid {pid} computes for {time}",
    "the claim {id} has ended, or it has no record: end its processes instead.",
    (
        "an open file of {user}'s does not answer while the locks of the claim {id} are looked for: end its "
        "processes instead."
    ),
    "no process has the locks of the claim {id} open: it is just ending.  Look again.",
    "a file that the claim {id} names as its own does not answer: end its processes instead.",
    "the kernel does not let you look into the processes of this claim.",
    "the driver does not show one of its GPUs",
    "the driver gives no list of the processes on {gpu} that could be believed",
    "adopted: pid {pids}",
    "job {job} has GPUs {gpus} of this node",
    "job {job} is over",
    "the job has no slurmstepd any more, and no epilog came",
    "the job is over, says Slurm, and no epilog came",
    "the job has got no slurmstepd, and no epilog came",
    "the holder was ended by {signal}",
    "the GPUs of job {job} are not claimed for it, so nothing starts on them",
    "the process that should hold its claim ended",
    # Of the daemon.
    (
        "a request of {user} did not claim {count} within {time}, though they were offered to it: it goes to the "
        "end of the queue"
    ),
    (
        "a request of {user} did not claim {count} within {time}, though they were offered to it: all its requests "
        "go to the end of the queue"
    ),
    "a request of {user} gave {count} back that no process has held: it goes to the end of the queue",
    "a request of {user} gave {count} back that no process has held: all its requests go to the end of the queue",
    "requests of {user} for GPUs took {time} of the last minute, so requests of others wait longer",
    "{count} lines about {user} within {time}",
    "the policy {policy} meets a fault inside gpuguard, and the others go on: {error}",
    "a fault inside gpuguard: {error}",
    "requests that never claim are not set back: {error}",
    "{count} policies, enforcing",
    "{count} policy, enforcing",
    "{count} policies, dry run",
    "{count} policy, dry run",
    "{status}: no policy has mode: enforce",
    "{status}: --enforce is missing",
    "{status}, but not against other users",
    "the metrics are not served: {reason}",
    "the changed policy file has faults, the last good one is in force",
    "driver unresponsive: {problem}",
    "the daemon before was killed, or the machine went down",
    "{count} events of {time} and later are missing",
    "{count} event of {time} and later are missing",
    "{count} faults, the first: {fault}",
    "{count} fault, the first: {fault}",
    "the usage store {path} is written again",
    "the usage store {path} cannot be written: {reason}",
    "it is tried again, and what GPUs are used for is kept in memory for 2 hours",
    "no memory is left",
    "outside_scheduler does not fire: {reason}",
    "this is no node of a Slurm cluster: it has neither a slurmd nor a slurm.conf",
    "slurm.conf has PrivateData=jobs, which shows the jobs of others to a daemon of root alone",
    "a quota of gpu_hours does not fire while it is unknown what was used",
    "the audit log cannot be read ({error}), so what was done in the last hour is unknown",
    "damaged lines in the audit log: {count}; each counts as a process that was ended just now",
    "used by another command inside the claim {id}",
    "a part of the GPU, or the whole of it, is claimed",
    "shared by others just now",
    "claimed just now",
    "it has no slot left",
    "they cannot be had together",
    "the driver does not show it",
    "that is not what you wait for",
    "these GPUs are not yours by that claim.",
    "you have no such ticket in the queue.",
    "who you are is not known here: you are in a user namespace of your own.",
    "the daemon cannot give locks now: {error}.",
    "say for how long: --for 4h.",
    "{time} is the longest here: ask for less, and again when it is nearly over.",
    "here no user can ask for that: the policy file says so.  Talk to the administrator.",
    "there is too much that you keep: end some of it with `gpuguard keep --end`.",
    "it is kept already, in all policies: see `gpuguard keep --list`.",
    (
        "no process or claim can be kept for more than {hours} h in {days} days.  Now {time} is left, and more from "
        "{when} on."
    ),
    "that was {count} times within a minute: wait a little.",
    "that is no user.",
    "only root may do that for other users: run it with sudo.",
    "root's own processes are never touched: say by --user or --device whom is meant.",
    "only root may ask for that: run it with sudo.",
    "only root may see what concerns other users.",
    "write the whole id of the claim.",
    "the daemon does not see the GPUs now, so it is unknown whether they are used.  Try again.",
    "nothing can be written into the log, so nothing was done.",
    "the claim cannot be released: {error}.",
    "{policy}: no GPU here is {device}",
    "{policy}: no model here is {model}",
    "observing only: no policy file was named",
    "observing only: the policy file has faults",
    # Of messages to send.
    "no answer in time",
    "it answers without end",
    "it has no address",
    "there is no user to write to",
    "the mail server refuses every address",
    "the mail server refuses user and password",
    "the mail server answers {code}",
    "the mail server does not play along ({kind})",
    "the mail server refuses {addresses}",
    "the web server answers {code}",
    "the token has characters that a header cannot carry",
    "apprise is missing: pip install 'gpuguard[notify]'",
    "{program} cannot be run",
    "apprise knows no service with such an address",
    "the service did not take the message",
    "there is no user {user} to run a hook as",
    "the certificate is not to be trusted: {reason}",
    "no connection ({kind})",
    "the answer makes no sense ({kind})",
    "the secret {name} is empty or missing",
    "the secret {name} is more than one line of text",
    "the secret {name} is not an ordinary file with one name",
    "the queue is full",
    "the sender has stopped",
    "{program} was not done in time",
    "{program} ends with status {status}",
    # What could not be read, and why the GPUs could not.
    "not supported",
    "not supported by this driver",
    "a driver call did not come back",
    "a driver call did not come back ({where})",
    "the driver library crashed ({where})",
    "the driver did not initialise within {seconds} s",
    "device {index}",
    "the driver",
    "{reason}.  Try `nvidia-smi`; if it hangs too, reboot.",
    "no process could be started that reads the GPUs: {error}.",
    "reading the GPUs failed inside gpuguard: {error}",
    "GPU {index} has {uuid}, too",
    "GPU {index} has the same uuid",
    "its uuid is {uuid}",
    "the driver does not count its GPUs: {reason}.  Try `nvidia-smi`.",
    "the driver counts {count} GPUs, which cannot be.  Try `nvidia-smi`.",
    "no simulated node is in {place}: `gpuguard sim start {spec}` starts one.",
    (
        "libnvidia-ml.so.1 ({library}) is there, but no NVIDIA kernel module answers.\nLoad it with `sudo modprobe "
        "nvidia` (after a kernel update: reboot), or see `dmesg`.  `--backend simulated` tries gpuguard without a "
        "GPU."
    ),
    (
        "the driver library is of version {library}, the loaded kernel module of version {kernel}: the driver was "
        "updated while the old module was in use.\nReboot; or end all GPU processes and who watches them "
        "(`systemctl stop gpuguard`) and reload the module: `sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset "
        "nvidia && sudo modprobe nvidia`."
    ),
    "the driver cannot be initialised: {reason}.  Try `nvidia-smi`, and see `dmesg`.",
    "of unknown version",
    "not told while the GPU is divided",
    "not told for MIG instances",
    "this nvidia-ml-py does not have it",
    "implausible value {value}",
    "implausible values {values}",
    "this driver counts it as used memory",
    "the memory of the GPU cannot be checked against it: {reason}",
    "implausible list: {reason}",
    "the processes of all kinds have more memory than the GPU",
    "the processes have more memory than is used",
    "the processes have more memory than the GPU",
    "pid {pid} cannot be a process",
    "pid {pid} is listed twice",
    "pid {pid} has {memory} bytes",
    "pid {pid} has more memory than the GPU",
    "pid {pid} is not in this pid namespace",
    "the pids are those of another pid namespace (a container's host): users and commands cannot be told from in here",
    "ECC is off",
    "a rate needs two looks",
    "no link tells",
    "this model does not have it",
    "the simulated driver does not tell it",
    "the simulated driver gives no process list",
    "the process list is not plausible: it has pids that cannot be",
    "nvidia-smi does not tell it",
    "nvidia-smi -q does not tell it",
    "nvidia-smi does not tell its uuid",
    "it is missing in the document",
    "a saved file does not tell who a process was",
    "a file of nvidia-smi does not tell who has claimed what",
    "the kernel does not know it",
    "{path}: this is nothing that `nvidia-smi -q -x` has written: {why}.",
    "this is nothing that `nvidia-smi -q -x` has written: {why}.",
    "it is larger than {size} MiB",
    "it declares entities",
    "it refers to another file",
    "it is not XML: {error}",
    "it does not begin with <nvidia_smi_log>",
    "it defines a document type of its own",
    "it has more elements, or more of them inside each other, than nvidia-smi writes",
    "there is no program nvidia-smi in the PATH: install the driver, or choose another --backend.",
    "nvidia-smi did not end within {seconds} s: the driver hangs.  See `dmesg`, or reboot.",
    "nvidia-smi cannot be started: {error}.  Choose another --backend.",
    "nvidia-smi may not read the GPUs: {text}",
    "nvidia-smi ended with {status}: {text}",
    "it said nothing",
    "{path} is no recording: `gpuguard record {path}` would make one.",
    "{path} is no recording, which is a gzip file: {error}.",
    "{path} is of version {version}, and this gpuguard reads {own}: update it.",
    "{path}, line {number}: this is no sample: {error}.",
    "{path}: a line is longer than any sample.",
    "{path} is empty: nothing was recorded.",
    "{path} has no whole sample: nothing was recorded.",
    "this recording is damaged: {error}.",
    "say which recording is meant, as in --backend replay:node7.rec.",
    "a replay has no option {name}: replay:FILE?speed=60&at=10m.",
    "speed={speed}: write how many times faster, as in speed=60.",
    "the backend nvml takes no {spec}: write `--backend nvml`.",
    "the recording does not tell who had claimed what",
    "the simulated node cannot be read: {error}.",
    "{path} is damaged ({error}).  `gpuguard sim start --force SPEC` makes a new node there.",
    "there is no simulated node in {directory}: start one with `gpuguard sim start 8xH100-80GB`.",
    "the simulated node cannot be changed: {error}.{why}",
    "{path} is not a directory of ours alone.  Remove it, or set GPUGUARD_SIM_DIR.",
    "{path} is not a directory: name another one for the simulated node.",
    "no directory for the simulated node: {error}.  Name one in GPUGUARD_SIM_DIR.",
    # The shortest last, as they would fit to longer ones.
    "the policy {policy}",
    "the job {why}",
    "{path} cannot be read: {error}.",
)
# Places of what others have named, or written.
NAMES = frozenset(
    {"command", "directory", "group", "id", "library", "name", "path", "place", "policy", "program", "spec"}
)
MOST_LEVELS = 8  # of sentences in sentences: what users write may look like a hundred
LONGEST = 1000  # characters, for which the patterns take a part of a second at most: that grows with the cube
_PLACE = re.compile(r"\{(\w+)\}")
_PLACES = {"gpu": r"(GPU \S+|MIG instance .+?)", "number": r"([\d,]+)", "command": "(.+?)"}
_ANYTHING = r"((?:(?!; ).)+?)"  # of one sentence: several stand behind each other with a semicolon


def phrases(say: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """The sentences as regular expressions, of Python and JavaScript, and what *say* says.

    There $1 is the first group, which may be a sentence, too, and $!1 is that group as it is.
    """
    for sentence in SENTENCES:
        form = say(sentence)
        for number, name in enumerate(dict.fromkeys(_PLACE.findall(sentence)), 1):
            form = form.replace(f"{{{name}}}", f"$!{number}" if name in NAMES else f"${number}")
        yield _pattern(sentence), form


def _pattern(sentence: str) -> str:
    names: list[str] = []
    text, *further = _PLACE.split(sentence)
    pattern = re.escape(text)
    for name, text in zip(further[::2], further[1::2], strict=True):
        if name in names:
            pattern += rf"\{names.index(name) + 1}"
        else:
            pattern += _PLACES.get(name, _ANYTHING)
            names.append(name)
        pattern += re.escape(text)
    return pattern.replace("\\ ", " ")


def in_words(sentence: str, say: Callable[[str], str], levels: int = MOST_LEVELS) -> str:
    """*sentence* as *say* says it; as it is where none is known, it is too long, or so many *levels* deep in others."""
    if not levels or len(sentence) > LONGEST:
        return sentence
    if known := _known(sentence, say, levels):
        return known
    parts = sentence.split("; ")
    told = [in_words(part, say, levels - 1) for part in parts] if len(parts) > 1 else parts
    if told != parts:
        return "；".join(told)
    what, colon, why = sentence.rpartition(": ")  # a finding, and why a step was not taken
    if colon and (said := _known(what, say, levels)):
        return f"{said}：{in_words(why, say, levels - 1)}"
    return sentence


def _known(sentence: str, say: Callable[[str], str], levels: int) -> str | None:
    if " " in sentence and (known := say(sentence)) != sentence:  # a word alone may be a name, or a command
        return known

    def in_place(text: str, is_name: bool) -> str:
        return text if is_name or " " not in text else in_words(text, say, levels - 1)

    for pattern, form in _compiled(say):
        if match := pattern.fullmatch(sentence):
            return re.sub(r"\$(!?)(\d)", lambda place: in_place(match[int(place[2])], place[1] == "!"), form)
    return None


@cache
def _compiled(say: Callable[[str], str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern, re.DOTALL), form) for pattern, form in phrases(say)]
