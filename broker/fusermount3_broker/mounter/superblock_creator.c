/*
 * superblock_creator.c - creates the superblock of a FUSE filesystem, perhaps among the processes of a container.
 *
 *     superblock_creator DIRECTORY PID_NAMESPACE DEVICE CONTEXT COMMAND...
 *
 * The arguments are those of create_superblock() in superblock.h; so is the exit status. The program has nothing worth
 * taking over: it is executed from a read-only tmpfs in no directory, so it leads to no file of the host; and it needs
 * no libc, so that few pages and few system calls are enough.
 */
#include "superblock.h"

/* The arguments. */
enum { DIRECTORY = 1, PID_NAMESPACE, DEVICE, CONTEXT, COMMANDS };
enum { MOST_COMMANDS = 8 };

static long number_of(const char *text)
{
    long number = 0;

    if (*text == '-')
        return -1;
    for (; *text != '\0'; text++)
        number = 10 * number + (*text - '0');
    return number;
}

static _Noreturn void run(long count, const char *const arguments[]);

/* The kernel puts the number of arguments and the arguments on the stack. */
__attribute__((used)) static _Noreturn void begin(const long *stack)
{
    run(stack[0], (const char *const *)(stack + 1));
}

#if defined(__x86_64__)
__asm__(".globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall begin\n");
#else
__asm__(".globl _start\n_start:\n\tmov x29, 0\n\tmov x0, sp\n\tbl begin\n");
#endif

#ifndef TESTED
static _Noreturn void run(long count, const char *const arguments[])
{
    long commands[MOST_COMMANDS + 1] = {0};

    if (count <= COMMANDS || count > COMMANDS + MOST_COMMANDS)
        end(EINVAL);
    for (long i = COMMANDS; i < count; i++)
        commands[i - COMMANDS] = number_of(arguments[i]);
    create_superblock(number_of(arguments[DIRECTORY]), number_of(arguments[PID_NAMESPACE]),
                      number_of(arguments[DEVICE]), number_of(arguments[CONTEXT]), commands);
}
#endif
