/* Connects to a socket in all ways in which a process could be mistaken for another one.

   peers SOCKET SETUID_COPY TRIALS SEED: for each trial it writes a line to stdout, `way pid euid successor`, when the
   connection is made and the processes that have to end have ended; then it waits for a byte on stdin. The pid and the
   euid are the connector's; the successor is another process with its connection or its pid. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PLAIN, DROPPED, SETUID, PASSED, DROPPED_LATER, NAMESPACE, PID_RETURNS, WAYS };
enum { OTHER_UID = 65534 };

static const char *path;

static void must(int ok, const char *what)
{
    if (!ok) {
        perror(what);
        _exit(1);
    }
}

static int arrive(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    must(connect(fd, (struct sockaddr *)&address, sizeof address) == 0, "connect");
    return fd;
}

static void speak(int fd, int done)
{
    must(write(fd, "x", 1) == 1, "write");
    must(write(done, "x", 1) == 1, "done");
    for (;;)
        pause();
}

/* A new process with a pid of our choice; 0 in it, -1 if the kernel does not allow that. */
static pid_t fork_as(pid_t pid)
{
    struct clone_args arguments = {.exit_signal = SIGCHLD, .set_tid = (unsigned long)&pid, .set_tid_size = 1};
    return (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments);
}

static void connector(int way, const char *setuid_copy, int done, int named)
{
    char descriptor[16];
    if (way == DROPPED || way == SETUID)
        must(setresuid(OTHER_UID, OTHER_UID, OTHER_UID) == 0, "setresuid");
    if (way == SETUID) {
        snprintf(descriptor, sizeof descriptor, "%d", done);
        execl(setuid_copy, setuid_copy, path, "as-root", descriptor, NULL);
        must(0, "exec");
    }
    int fd = arrive();
    if (way == DROPPED_LATER)
        must(setresuid(OTHER_UID, OTHER_UID, OTHER_UID) == 0, "setresuid");
    if (way == PID_RETURNS) {
        must(write(fd, "x", 1) == 1 && write(done, "x", 1) == 1, "done");
        _exit(0);
    }
    if (way == PASSED) {
        pid_t heir = fork();
        if (heir != 0) {
            must(write(named, &heir, sizeof heir) == sizeof heir, "name");
            _exit(0);
        }
    }
    speak(fd, done);
}

static void end(pid_t pid)
{
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

static void trial(int way, const char *setuid_copy)
{
    int ready[2], named[2];
    char byte;
    pid_t successor = 0, pid;
    must(pipe(ready) == 0 && pipe(named) == 0, "pipe");
    pid = fork();
    if (pid == 0 && way == NAMESPACE) { /* the grandchild is 1 in there, and something else here */
        must(unshare(CLONE_NEWPID) == 0, "unshare");
        pid_t inner = fork();
        if (inner == 0)
            connector(way, setuid_copy, ready[1], named[1]);
        must(write(named[1], &inner, sizeof inner) == sizeof inner, "name");
        _exit(0);
    }
    if (pid == 0)
        connector(way, setuid_copy, ready[1], named[1]);
    must(read(ready[0], &byte, 1) == 1, "ready");
    if (way == NAMESPACE) {
        must(waitpid(pid, NULL, 0) == pid, "wait");
        must(read(named[0], &pid, sizeof pid) == sizeof pid, "name");
    }
    if (way == PASSED || way == PID_RETURNS)
        must(waitpid(pid, NULL, 0) == pid, "wait");
    if (way == PASSED)
        must(read(named[0], &successor, sizeof successor) == sizeof successor, "name");
    if (way == PID_RETURNS && (successor = fork_as(pid)) == 0)
        for (;;)
            pause();
    printf("%d %d %d %d\n", way, pid, way == DROPPED ? OTHER_UID : 0, successor);
    fflush(stdout);
    must(read(0, &byte, 1) == 1, "go on");
    if (successor > 0)
        end(successor);
    else if (way != PID_RETURNS)
        end(pid);
    for (int i = 0; i < 2; i++) {
        close(ready[i]);
        close(named[i]);
    }
}

int main(int count, char **arguments)
{
    path = arguments[1];
    if (!strcmp(arguments[2], "as-root"))
        speak(arrive(), atoi(arguments[3]));
    must(count == 5, "usage");
    prctl(PR_SET_CHILD_SUBREAPER, 1); /* whom a child leaves behind is ours to end */
    srand((unsigned)atoi(arguments[4]));
    for (int left = atoi(arguments[3]); left > 0; left--) {
        int chance = rand() % 100; /* a new namespace takes milliseconds */
        trial(chance == 0 ? NAMESPACE : chance < 20 ? PID_RETURNS : rand() % NAMESPACE, arguments[2]);
    }
    return 0;
}
