// Runs a command and writes to a file: exit status, seconds, seconds of CPU, KiB resident at most.
//     meter FILE COMMAND [ARGUMENT...]
// It is small, because what a process was before exec() counts in what the kernel says of its size, and it waits for
// whatever the command leaves behind, because nobody else would count its CPU.

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec + at.tv_nsec / 1e9;
}

int main(int count, char **words) {
  if (count < 3) return 2;
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  double begun = now(), seconds = 0;
  pid_t command = fork(), ended;
  if (command == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execvp(words[2], words + 2);
    perror(words[2]);
    _exit(127);
  }
  int status = 0, one;
  alarm(60);  // whatever does not end by then: there is no file, and the command dies with us
  while ((ended = wait(&one)) > 0)
    if (ended == command) status = one, seconds = now() - begun;
  struct rusage used;
  getrusage(RUSAGE_CHILDREN, &used);
  double cpu = used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
  FILE *file = fopen(words[1], "w");
  if (!file) return 2;
  fprintf(file, "%d %f %f %ld\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), seconds, cpu, used.ru_maxrss);
  return fclose(file) ? 2 : 0;
}
