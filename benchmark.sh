#!/usr/bin/env bash
# Sweeps algorithms × tasks × seeds and ends with the report: ./benchmark.sh --quick (alone, it explains itself).
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
    echo "error: bash 4.4 or newer is needed, this is $BASH_VERSION (macOS: brew install bash)" >&2
    exit 1
fi
set -euo pipefail

usage() {
    cat <<'HELP'
Sweeps algorithms × tasks × seeds, as the paper does, and ends with the report.

  ./benchmark.sh --quick                    six algorithms on small tasks: minutes on two cores
  ./benchmark.sh --paper --gpus 0,1 --workers 8
  ./benchmark.sh --paper --slurm --partition gpu --time 24:00:00 --gpus-per-task 1
  ./benchmark.sh --algos sdar,sac --tasks Hopper-v4,Ant-v4 --seeds 3 --workers 2
  ./benchmark.sh --algos sdar --label joint --extra-args "--selection joint"

The same command again continues: finished runs are skipped, interrupted ones resumed, nothing is overwritten. Ctrl-C
stops each run with a checkpoint when its episode ends (a second one at once). The exit status is 0 when every run is
finished.

What to run (what is not named is as in the paper: 6 algorithms, 11 tasks, 10 seeds):
  --quick               small networks and budgets, in quick/; other options still hold
  --paper               all of it: 660 runs
  --algos LIST          of sdar,sac,nrep,taac,temporl,ute
  --tasks LIST          Gymnasium ids, of the paper or not
  --seeds N | LIST      10 is 1 to 10; 1,2,5 is these; 7, is 7 alone
  --total-timesteps N   steps of each run (default: the task's budget; other tasks than the paper's need it)
  --extra-args "…"      options for every run, as the scripts take them
  --label NAME          added to the name of the experiment, to keep variants apart
  --track               log to Weights & Biases, grouped by algorithm and task

Where and how:
  --runs-dir DIR        run directories, and logs in .logs/ (default: runs)
  --report-dir DIR      the report (default: report)
  --workers N           runs at a time (default: one per GPU, or one per core)
  --gpus LIST           train on these GPUs in turn (default: on the CPU, one thread for each run)
  --retries N           how often a failed run is tried again (default: 1)
  --dry-run             print the commands, start nothing and check nothing but the options
  --settings            print the settings that depend on the task

Each of the paper's tasks has settings of its own (steps, N-Rep's n, TempoRL's and UTE's J, SDAR's λ and family,
TAAC's family); --extra-args win over them. Other tasks are trained with the scripts' defaults, and the sweep says so.

On the CPU, new runs are compiled (--compile) if there is a C++ compiler, except with --quick, whose runs are too short
to win the time back. --extra-args --no-compile turns that off.

On a cluster, instead of --workers and --gpus:
  --slurm               submit one job array; a task that is preempted, or has 5 minutes left, stops with a checkpoint
                        when its episode ends, and continues by itself when its turn comes again
  --partition NAME  --time LIMIT  --mem SIZE  --gpus-per-task N  --cpus-per-task N  --max-running N

PYTHON=… names the interpreter (default: .venv/bin/python beside this script, else python3); OMP_NUM_THREADS=… the
threads of a run (default: 1); CXX=… the C++ compiler (default: g++, on macOS clang++).
HELP
}

fail() {
    echo "error: $*" >&2
    exit 1
}

print_settings() { # as Markdown, from the tables below
    local family
    echo "| task | steps | N-Rep: n | TempoRL: J | UTE: J | SDAR: λ | SDAR: family | TAAC: family |"
    echo "|---|--:|--:|--:|--:|--:|---|---|"
    sed 's/ / | /g; s/.*/| & |/' <<<"$SETTINGS"
    echo
    echo "| SDAR's family | options |"
    echo "|---|---|"
    echo "| persistent | \`${SDAR[persistent]}\` |"
    echo
    echo "| TAAC's family | options | warm-up |"
    echo "|---|---|--:|"
    for family in simple-control locomotion terrain manipulation; do
        echo "| $family | \`${TAAC[$family]}\` | ${TAAC_WARMUP[$family]} |"
    done
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ALGOS=sdar,sac,nrep,taac,temporl,ute
declare -A SCRIPT=([sdar]=sdar_continuous_action [sac]=sac_continuous_action [nrep]=nrep_sac
    [taac]=taac_continuous_action [temporl]=temporl_continuous_action [ute]=ute_continuous_action)

# The settings that depend on the task: steps, n of N-Rep, J of TempoRL and UTE, λ and family of SDAR, and
# TAAC's family.
SETTINGS="MountainCarContinuous-v0 100000 4 20 20 0.5 persistent simple-control
LunarLanderContinuous-v3 300000 4 10 4 0.5 persistent simple-control
BipedalWalker-v3 600000 4 20 20 0.5 agile terrain
HalfCheetah-v4 3000000 2 20 20 0.5 agile locomotion
Humanoid-v4 3000000 4 20 20 0.5 agile locomotion
Walker2d-v4 1500000 4 20 20 0.5 agile locomotion
Hopper-v4 1000000 4 20 20 0.5 agile locomotion
Ant-v4 3000000 2 20 20 0.5 agile locomotion
FetchReach-v4 100000 2 20 20 0.5 agile manipulation
Pusher-v5 500000 4 20 20 0.5 agile other
Reacher-v4 100000 2 20 20 0.5 agile other"
declare -A BUDGET REPEAT TEMPORL_SKIP UTE_SKIP ENTROPY_SCALE SDAR_FAMILY FAMILY
while read -r task budget repeat temporl_skip ute_skip entropy_scale sdar_family family; do
    BUDGET[$task]=$budget REPEAT[$task]=$repeat TEMPORL_SKIP[$task]=$temporl_skip UTE_SKIP[$task]=$ute_skip
    ENTROPY_SCALE[$task]=$entropy_scale SDAR_FAMILY[$task]=$sdar_family FAMILY[$task]=$family
done <<<"$SETTINGS"

# SDAR's defaults act quickly; in simple control, whose rewards come late, more persistence learns sooner.
declare -A SDAR=(
    [agile]=""
    [persistent]="--act-prior 0.2 --action-entropy acting --no-entropy-in-target --target-action-entropy -0.5 --n-step 4 --warmup-repeats one --initial-act-probability 0.5 --initial-alpha-selection 1 --initial-alpha-action 1")

# TAAC's authors have settings for families of tasks; "other" are the script's defaults.
declare -A TAAC=(
    [simple-control]="--learning-rate 1e-4 --reward-normaliser full --reward-clip 5 --action-min-prob 0.1 --log-std-min -20"
    [locomotion]="--advantage-clip"
    [terrain]="--learning-rate 5e-4 --reward-normaliser full --reward-clip 1 --action-min-prob 0.1 --log-std-min -20 --td-length 6"
    [manipulation]="--learning-rate 1e-3 --reward-normaliser full --reward-clip 1 --action-min-prob 0.2 --log-std-min -20"
    [other]="")
declare -A TAAC_WARMUP=([simple-control]=10000 [locomotion]=50000 [terrain]=20000 [manipulation]=10000)

QUICK_TASKS=Reacher-v4,Pendulum-v1
QUICK_STEPS=4000
QUICK_ARGS=(--hidden-dim 64 --batch-size 64 --learning-starts 500 --eval-every 1000 --eval-episodes 5)

TAKEN=75 # a run's exit status when another process has its directory (sdar_utils/run.py)

# --- options ---

(($#)) || { usage; exit; }
command_line=$(printf ' %q' "$0" "$@")
preset='' algos='' tasks='' seeds='' total_timesteps='' extra_args='' label='' track='' runs_dir='' report_dir=''
workers='' gpus='' retries=1 dry_run='' slurm='' partition='' time='' mem='' gpus_per_task='' cpus_per_task=''
max_running='' slurm_task=''
while (($#)); do
    case $1 in
        --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
        -h | --help) usage && exit ;;
        --quick | --paper)
            [[ -z $preset || $preset == "$1" ]] || fail "--quick and --paper are two different sweeps; choose one"
            preset=$1 ;;
        --track) track=yes ;;
        --dry-run) dry_run=yes ;;
        --slurm) slurm=yes ;;
        --settings) print_settings && exit ;;
        --algos | --tasks | --seeds | --total-timesteps | --extra-args | --label | --runs-dir | --report-dir | \
            --workers | --gpus | --retries | --partition | --time | --mem | --gpus-per-task | --cpus-per-task | \
            --max-running | --slurm-task)
            (($# > 1)) || fail "$1 needs a value"
            [[ -n $2 ]] || fail "$1 has an empty value"
            variable=${1#--} variable=${variable//-/_}
            printf -v "$variable" %s "$2"
            shift ;;
        *) fail "unknown option $1; ./benchmark.sh alone lists them" ;;
    esac
    shift
done

is_count() { # VALUE MINIMUM
    [[ $1 =~ ^(0|[1-9][0-9]{0,17})$ ]] && (($1 >= $2))
}

split() { # --option LIST NAME: puts the entries of a comma-separated list into the array NAME
    local entry
    local -n entries=$3
    declare -A seen=()
    IFS=, read -ra entries <<<"$2"
    ((${#entries[@]})) || fail "$1 is empty"
    for entry in "${entries[@]}"; do
        [[ -n $entry && $entry != *[[:space:]]* ]] || fail "$1 '$2': an entry is empty or has a space; write a,b,c"
        [[ -z ${seen[$entry]:-} ]] || fail "$1 '$2' names $entry twice"
        seen[$entry]=yes
    done
}

absolute() { [[ $1 == /* ]] && echo "$1" || echo "$PWD/$1"; }

find_python() {
    python=$ROOT/.venv/bin/python
    [[ -x $python ]] || python=python3
    python=$(type -P "${PYTHON:-$python}") ||
        fail "there is no Python at '${PYTHON:-python3}'; make train sets one up, or name it with PYTHON=…"
    python=$(absolute "$python")
}

algo_list=() task_list=() seed_list=() gpu_list=() extra_list=() notes=() # what to say before the sweep begins

check_options() {
    local entry name words
    [[ -n $preset$algos$tasks ]] || fail "what to run? Name --quick, --paper, --algos or --tasks"
    for name in partition time mem gpus_per_task cpus_per_task max_running; do
        [[ -n $slurm || -z ${!name} ]] || fail "--${name//_/-} is for --slurm only"
    done
    [[ -z $slurm || -z $workers$gpus ]] ||
        fail "--workers and --gpus are for this machine; with --slurm, name --max-running and --gpus-per-task"
    for name in workers total_timesteps gpus_per_task cpus_per_task max_running; do
        [[ -z ${!name} ]] || is_count "${!name}" 1 ||
            fail "--${name//_/-} must be a whole number of at least 1, not '${!name}'"
    done
    is_count "$retries" 0 || fail "--retries must be a whole number, not '$retries'"
    [[ -z $label || $label =~ ^[A-Za-z0-9._-]+$ ]] ||
        fail "--label '$label' may have letters, digits, dots and dashes only"

    if [[ -n $gpus ]]; then
        split --gpus "$gpus" gpu_list
        workers=${workers:-${#gpu_list[@]}}
    fi
    workers=${workers:-$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)}

    if [[ $preset == --quick ]]; then
        tasks=${tasks:-$QUICK_TASKS} seeds=${seeds:-2} total_timesteps=${total_timesteps:-$QUICK_STEPS}
        runs_dir=${runs_dir:-quick/runs} report_dir=${report_dir:-quick/report} extra_list=("${QUICK_ARGS[@]}")
    fi
    runs_dir=$(absolute "${runs_dir:-runs}") report_dir=$(absolute "${report_dir:-report}")

    split --algos "${algos:-$ALGOS}" algo_list
    for entry in "${algo_list[@]}"; do
        [[ -n ${SCRIPT[$entry]:-} ]] || fail "--algos: there is no '$entry'; choose from $ALGOS"
    done
    split --tasks "${tasks:-$(cut -d ' ' -f 1 <<<"$SETTINGS" | paste -s -d , -)}" task_list
    for entry in "${task_list[@]}"; do
        [[ -n ${total_timesteps:-${BUDGET[$entry]:-}} ]] ||
            fail "$entry is not one of the paper's tasks and has no budget; name --total-timesteps"
        [[ -n ${FAMILY[$entry]:-} ]] ||
            notes+=("$entry is not in the table of settings (--settings): it is trained with the scripts' defaults")
    done
    seeds=${seeds:-10}
    if [[ $seeds != *,* ]]; then
        is_count "$seeds" 1 || fail "--seeds must be how many, or a list as in 1,2,5; not '$seeds'"
        seeds=$(seq -s , "$seeds")
    fi
    split --seeds "${seeds%,}" seed_list
    for entry in "${seed_list[@]}"; do
        is_count "$entry" 0 || fail "--seeds: '$entry' is no seed"
    done

    find_python
    report=("$python" "$ROOT/report.py" "$runs_dir" --out "$report_dir")
    if [[ -n $extra_args ]]; then
        words=$("$python" -c 'import shlex, sys
print(*shlex.split(sys.argv[1]), sep="\n")' "$extra_args" 2>/dev/null) ||
            fail "--extra-args: the quotes in '$extra_args' do not match"
        while read -r entry; do
            name=${entry%%=*}
            case ${name//_/-} in
                --env-id | --seed | --total-timesteps | --exp-name | --run-name | --runs-dir | --resume | --no-resume | \
                    --cuda | --no-cuda | --track | --no-track)
                    fail "--extra-args must not set $name: that is the sweep's; see its own options" ;;
            esac
            extra_list+=("$entry")
        done <<<"$words"
    fi
    decide_on_compiling
}

on_gpus() { [[ -n $gpus$gpus_per_task ]]; }

decide_on_compiling() { # in $compile
    local compiler=g++ # what torch looks for, and how: torch._inductor.cpp_builder
    [[ $OSTYPE != darwin* ]] || compiler=clang++
    compile=''
    if on_gpus || [[ $preset == --quick || " ${extra_list[*]} " =~ " --"(no-)?"compile " ]]; then
        return
    elif "${CXX-$compiler}" --version >/dev/null 2>&1; then
        compile=yes
        notes+=("C++ compiler found: new runs are compiled (--extra-args --no-compile turns that off)")
    else
        notes+=("no C++ compiler found: new runs are not compiled and take longer; install one (Debian: g++) or set CXX")
    fi
}

# --- runs ---

# The sweep's runs, one entry of each for every run. Seeds first: a sweep that is half done is a smaller study.
run_algo=() run_task=() run_seed=() run_name=() run_steps=()

list_runs() {
    local algo task seed
    for seed in "${seed_list[@]}"; do
        for task in "${task_list[@]}"; do
            for algo in "${algo_list[@]}"; do
                run_algo+=("$algo") run_task+=("$task") run_seed+=("$seed")
                run_name+=("${task//\//-}__$(experiment "$algo")__$seed")
                run_steps+=("${total_timesteps:-${BUDGET[$task]}}")
            done
        done
    done
}

experiment() { echo "${SCRIPT[$1]}${label:+-$label}"; }

is_begun() { [[ -d $runs_dir/$1 ]]; } # NAME

is_finished() { [[ -e $runs_dir/$1/agent.pt ]]; } # NAME

make_settings() { # ALGO TASK STEPS: the options that the task asks for, in $settings
    local family=${FAMILY[$2]:-} warmup
    settings=()
    [[ -n $family ]] || return 0
    case $1 in
        sdar)
            read -ra settings <<<"${SDAR[${SDAR_FAMILY[$2]}]}"
            settings+=(--selection-entropy-scale "${ENTROPY_SCALE[$2]}") ;;
        nrep) settings=(--repeat "${REPEAT[$2]}") ;;
        temporl) settings=(--max-skip "${TEMPORL_SKIP[$2]}") ;;
        ute) settings=(--max-skip "${UTE_SKIP[$2]}") ;;
        taac)
            read -ra settings <<<"${TAAC[$family]}"
            warmup=${TAAC_WARMUP[$family]:-}
            ((${warmup:-0} * 10 <= $3)) || warmup=$(($3 / 10)) # of a run that is cut short
            [[ -z $warmup ]] || settings+=(--learning-starts "$warmup") ;;
    esac
}

make_command() { # RUN: the command that starts or continues it, in $words
    local algo=${run_algo[$1]} task=${run_task[$1]} name=${run_name[$1]}
    words=("$python" "$ROOT/${SCRIPT[$algo]}.py" --env-id "$task" --seed "${run_seed[$1]}"
        --total-timesteps "${run_steps[$1]}" --exp-name "$(experiment "$algo")" --run-name "$name"
        --runs-dir "$runs_dir")
    make_settings "$algo" "$task" "${run_steps[$1]}"
    words+=("${settings[@]}")
    if on_gpus; then words+=(--cuda); else words+=(--no-cuda); fi
    [[ -z $track ]] || words+=(--track)
    if is_begun "$name"; then
        words+=(--resume) # which remembers whether the run is compiled
    elif [[ -n $compile ]]; then
        words+=(--compile)
    fi
    words+=("${extra_list[@]}")
}

# What only Python knows, before hundreds of runs fail: that the packages, GPUs and tasks are there, that each algorithm
# takes its options, and that the runs that exist, finished ones too, were started with the same ones.
CHECK='
import importlib, sys
from pathlib import Path

root, gpus, tasks = sys.argv[1:]
sys.path[0] = root
commands = [record.split("\0") for record in sys.stdin.read().split("\0\n\0")[:-1]]
try:
    import tyro
    from sdar_utils.devices import cuda_trouble
    from sdar_utils.envs import make_env
    from sdar_utils.options import check_same_options, stored_options
    modules = {script: importlib.import_module(Path(script).stem) for _, script, *_ in commands}
except ImportError as error:
    sys.exit(f"error: {sys.executable} does not do ({error}); make train sets one up, or name another with PYTHON=…")
for index, gpu in enumerate(gpus.split(",") if gpus else []):  # that torch counts it is not enough
    trouble = cuda_trouble(f"cuda:{index}")
    if trouble is not None:
        sys.exit(f"error: --gpus {gpus}: {gpu} cannot be used: {trouble}; without --gpus the CPU is used")
for task in tasks.split(","):
    make_env(task).close()
checked = set()
for _, script, *words in commands:
    directory = Path(words[words.index("--runs-dir") + 1]) / words[words.index("--run-name") + 1]
    if script in checked and not directory.exists():
        continue
    checked.add(script)
    try:
        args = tyro.cli(modules[script].Args, args=words)
    except SystemExit:
        sys.exit(f"error: --extra-args do not fit {Path(script).name}")
    modules[script].check_args(args)
    if directory.exists():
        try:
            stored = stored_options(args)
            if not {"--compile", "--no-compile"} & {*words}:  # then a run keeps what it has
                args.compile = stored["compile"]
            check_same_options(args, stored, directory)
        except SystemExit as error:
            sys.exit(f"{error} (for a sweep: --label or another --runs-dir)")
'

check_in_python() {
    local run task_names
    task_names=$(IFS=, && echo "${task_list[*]}")
    for run in "${!run_name[@]}"; do
        make_command "$run"
        printf '%s\0' "${words[@]}" $'\n'
    done | env ${gpus:+"CUDA_VISIBLE_DEVICES=$gpus"} "$python" -c "$CHECK" "$ROOT" "$gpus" "$task_names" || exit 1
}

# --- on this machine ---

# A worker's environment: its GPU and how many share it, and one thread, which is all these networks can use.
make_environment() { # WORKER: in $environment
    local number=${#gpu_list[@]}
    environment=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}")
    if ((number)); then
        environment+=("CUDA_VISIBLE_DEVICES=${gpu_list[$1 % number]}" "RUNS_PER_GPU=$(((workers + number - 1) / number))")
    fi
}

quoted() { # WORDS…: as they can be pasted into a shell
    local line
    line=$(printf '%q ' "$@")
    echo "${line% }"
}

# What the workers are doing: process, run, start, and whether it is the run's first; and the sweep's books.
pid=() current=() began=() fresh=() tries=() queue=()
done_count=0 failed=() busy=()
timed_seconds=0 timed_steps=0 # of runs that went from their first step to their last here
signals=0 forwarded=0 last_signal=''

start_run() { # WORKER RUN
    local log=$runs_dir/.logs/${run_name[$2]}.log
    make_command "$2"
    make_environment "$1"
    fresh[$1]=yes
    ! is_begun "${run_name[$2]}" || fresh[$1]=''
    echo "\$ $(quoted "${environment[@]}" "${words[@]}")" >>"$log"
    set -m # a process group of its own: Ctrl-C in the terminal must reach the runs through us, and once only
    env "${environment[@]}" "${words[@]}" >>"$log" 2>&1 </dev/null &
    pid[$1]=$!
    set +m
    current[$1]=$2 began[$1]=$SECONDS tries[$2]=$((${tries[$2]:-0} + 1))
}

end_run() { # WORKER, whose process is gone
    local run=${current[$1]} name status=0
    name=${run_name[$run]}
    wait "${pid[$1]}" 2>/dev/null || status=$?
    unset "pid[$1]" "current[$1]"
    if is_finished "$name"; then
        done_count=$((done_count + 1))
        if [[ -n ${fresh[$1]} ]]; then
            timed_seconds=$((timed_seconds + SECONDS - began[$1])) timed_steps=$((timed_steps + run_steps[run]))
        fi
    elif ((status == TAKEN)); then
        busy+=("$name")
    elif ((signals)); then
        : # it was asked to stop
    elif ((tries[run] <= retries)); then
        queue=("$run" "${queue[@]}")
    else
        failed+=("$name")
    fi
}

# From the speed of the runs that have finished, as if a resumed run had all its steps before it.
eta() {
    local run worker left=0 rest
    ((timed_steps)) || return 0
    for run in "${queue[@]}"; do
        left=$((left + run_steps[run] * timed_seconds / timed_steps))
    done
    for worker in "${!current[@]}"; do
        rest=$((run_steps[current[worker]] * timed_seconds / timed_steps - SECONDS + began[worker]))
        left=$((left + (rest > 0 ? rest : 0)))
    done
    left=$((left / workers))
    printf ', about %dh%02dm to go' $((left / 3600)) $((left % 3600 / 60))
}

last_status=''
show_status() {
    local status="$done_count of ${#run_name[@]} done, ${#pid[@]} running, ${#failed[@]} failed"
    ((${#busy[@]} == 0)) || status+=", ${#busy[@]} busy elsewhere"
    if [[ -t 1 ]]; then
        printf '\r\033[K%s' "$status$(eta)"
    elif [[ $status != "$last_status" ]]; then
        echo "$status$(eta)"
        last_status=$status
    fi
}

# A run takes a first signal as the request to write a checkpoint and a second one as the order to end at once.
forward_signals() {
    local worker
    ((signals > forwarded)) || return 0
    [[ ! -t 1 ]] || echo
    ((forwarded)) || echo "stopping: ${#pid[@]} runs finish their episodes and write checkpoints"
    forwarded=$signals
    for worker in "${!pid[@]}"; do
        kill -TERM "${pid[$worker]}" 2>/dev/null || true
    done
}

run_here() {
    local run worker name
    mkdir -p "$runs_dir/.logs" || fail "cannot write to --runs-dir $runs_dir"
    for run in "${!run_name[@]}"; do
        if is_finished "${run_name[$run]}"; then
            done_count=$((done_count + 1))
        else
            queue+=("$run")
        fi
    done
    echo "${#run_name[@]} runs, $done_count of them finished already; directories in $runs_dir, logs in $runs_dir/.logs"
    trap 'signals=$((signals + 1)) last_signal=2' INT
    trap 'signals=$((signals + 1)) last_signal=15' TERM
    trap 'signals=$((signals + 1)) last_signal=1' HUP
    while :; do
        forward_signals
        for ((worker = 0; worker < workers; worker++)); do
            if [[ -n ${pid[$worker]:-} ]] && ! kill -0 "${pid[$worker]}" 2>/dev/null; then
                end_run "$worker"
            fi
            if [[ -z ${pid[$worker]:-} ]] && ((${#queue[@]} && !signals)); then
                start_run "$worker" "${queue[0]}"
                queue=("${queue[@]:1}")
            fi
        done
        show_status
        ((${#pid[@]})) || break
        sleep 0.5 || true # Ctrl-C ends it early
    done
    trap - INT TERM HUP
    [[ ! -t 1 ]] || echo
    if ((signals)); then
        echo "stopped; to continue:$command_line" >&2
        exit $((128 + last_signal))
    fi
    ((done_count == 0)) || "${report[@]}" || fail "the report could not be made"
    for name in "${failed[@]}"; do
        echo "failed: $name; the end of $runs_dir/.logs/$name.log:"
        tail -n 5 "$runs_dir/.logs/$name.log" | sed 's/^/    /'
    done >&2
    for name in "${busy[@]}"; do
        echo "busy: another process is writing $runs_dir/$name"
    done >&2
    ((${#failed[@]} + ${#busy[@]} == 0)) || exit 1
}

# --- on a cluster ---

# The tasks file has a line for each run: its name and its command, quoted. Job array index i is line i + 1.

make_submission() { # TASKS_FILE NUMBER: in $words
    words=(sbatch --parsable --job-name=sdar-benchmark "--array=0-$(($2 - 1))${max_running:+%$max_running}" --requeue
        --signal=B:USR1@300 --open-mode=append "--output=${1//%/%%}.%a.out" --ntasks=1
        "--cpus-per-task=${cpus_per_task:-1}")
    [[ -z $partition ]] || words+=("--partition=$partition")
    [[ -z $time ]] || words+=("--time=$time")
    [[ -z $mem ]] || words+=("--mem=$mem")
    [[ -z $gpus_per_task ]] || words+=("--gpus-per-task=$gpus_per_task")
    words+=("$ROOT/benchmark.sh" --slurm-task "$1" --runs-dir "$runs_dir" --retries "$retries")
}

# Names of the runs that an earlier submission has in the queue or running.
list_queued() {
    local jobs file id index lines
    jobs=$(squeue --noheader --array --user="$(id -un)" --format='%F %K') ||
        fail "squeue failed, so it is not clear what is queued already"
    for file in "$runs_dir"/.sweeps/*.job; do
        [[ -e $file ]] || continue
        mapfile -t lines <"${file%.job}.tasks"
        while read -r id index; do
            [[ $id != "$(<"$file")" ]] || echo "${lines[$index]%% *}"
        done <<<"$jobs"
    done
}

submit() {
    local run tasks_file queued limit job number lines=()
    make_environment 0
    type -P sbatch >/dev/null || fail "there is no sbatch here; --slurm is for a cluster's login node"
    mkdir -p "$runs_dir/.sweeps" "$runs_dir/.logs" || fail "cannot write to --runs-dir $runs_dir"
    queued=$(list_queued) || exit 1
    for run in "${!run_name[@]}"; do
        is_finished "${run_name[$run]}" && done_count=$((done_count + 1)) && continue
        grep -qxF -e "$(quoted "${run_name[$run]}")" <<<"$queued" && continue
        make_command "$run"
        lines+=("$(quoted "${run_name[$run]}" env "${environment[@]}" "${words[@]}")")
    done
    number=${#lines[@]}
    if ((number == 0)); then
        echo "nothing to submit: $done_count of ${#run_name[@]} runs are finished, the others queued or running"
        ((done_count < ${#run_name[@]})) || "${report[@]}"
        return
    fi
    limit=$(scontrol show config | sed -n 's/^MaxArraySize *= *//p')
    ((number <= ${limit:-number})) ||
        fail "$number runs are more than this cluster's job arrays hold ($limit, MaxArraySize); choose fewer --seeds"
    tasks_file=$runs_dir/.sweeps/$(date +%Y%m%d-%H%M%S)-$$.tasks
    printf '%s\n' "${lines[@]}" >"$tasks_file"
    make_submission "$tasks_file" "$number"
    job=$("${words[@]}") || fail "sbatch refused; nothing was submitted"
    job=${job%%;*}
    echo "$job" >"${tasks_file%.tasks}.job"
    cat <<SUBMITTED
submitted $number runs as job array $job ($done_count of ${#run_name[@]} are finished already)
watch:   squeue --array --job $job
         tail -f $(quoted "$runs_dir")/.logs/*.log
cancel:  scancel $job    (the same command submits what is left)
report:  $(quoted "${report[@]}")
SUBMITTED
}

# One task of the array, on its node. Slurm ends a job with SIGTERM when it is preempted, requeued or cancelled, and
# announces its time limit with SIGUSR1, early enough for an episode to end. Whichever it is, the run is asked to stop.
run_slurm_task() {
    local line name command log checkpoint before try status index=${SLURM_ARRAY_TASK_ID:?}
    local job=${SLURM_ARRAY_JOB_ID}_$index # not SLURM_JOB_ID: that of one task is also the whole array's
    mapfile -t -s "$index" -n 1 line <"$slurm_task"
    eval "command=(${line[0]})"
    name=${command[0]} command=("${command[@]:1}")
    log=$runs_dir/.logs/$name.log checkpoint=$runs_dir/$name/checkpoint.pt
    before=$(written "$checkpoint")
    trap 'signals=$((signals + 1)) last_signal=USR1' USR1
    trap 'signals=$((signals + 1)) last_signal=TERM' TERM
    for ((try = 0; try <= retries && signals == 0; try++)); do
        words=("${command[@]}")
        ! is_begun "$name" || words+=(--resume) # twice if it was begun when it was submitted: no harm
        echo "\$ $(quoted "${words[@]}")" >>"$log"
        "${words[@]}" >>"$log" 2>&1 </dev/null &
        pid=$! status=0
        wait "$pid" 2>/dev/null || status=$? # until it ends, or a signal comes
        # SIGINT, because Slurm may have sent its SIGTERM to the whole tree or only to this shell, as the site has it,
        # and a second SIGTERM would end the run without a checkpoint. SIGINT may be repeated: in the background of a
        # script a process begins by ignoring it, and the run heeds one between its start and its end.
        while ((signals)) && kill -INT "$pid" 2>/dev/null; do
            sleep 1 || true
        done
        ! is_finished "$name" || exit 0
        ((status != TAKEN)) || fail "another process is writing $runs_dir/$name"
    done
    ((signals)) || fail "$name failed; see $log"

    # A requeued or cancelled job is no longer running by now, and what becomes of it is decided; one that reached its
    # time limit, or that is preempted with a grace time, would just end.
    trap '' TERM USR1
    if [[ $(squeue --noheader --job="$job" --format=%T) == RUNNING ]]; then
        [[ $last_signal == TERM || $(written "$checkpoint") != "$before" ]] ||
            fail "$name wrote no checkpoint before its time limit; give it a longer --time"
        echo "$(date): $name goes back to the queue"
        scontrol requeue "$job"
    fi
    exit 143
}

written() { stat -c %y "$1" 2>/dev/null || true; } # FILE: when, or nothing

# --- the sweep ---

print_sweep() {
    local run worker=0
    ((${#notes[@]} == 0)) || printf '# %s\n' "${notes[@]}"
    for run in "${!run_name[@]}"; do
        is_finished "${run_name[$run]}" && echo "# finished: ${run_name[$run]}" && continue
        make_command "$run"
        make_environment "$worker"
        quoted "${environment[@]}" "${words[@]}"
        worker=$(((worker + 1) % workers))
    done
    if [[ -n $slurm ]]; then
        echo "# as one job array, without the runs that are finished or queued"
        make_submission "$runs_dir/.sweeps/TIME.tasks" "${#run_name[@]}"
        quoted "${words[@]}"
    fi
    echo "# when all are finished"
    quoted "${report[@]}"
}

main() {
    if [[ -n $slurm_task ]]; then
        run_slurm_task
    fi
    check_options
    list_runs
    if [[ -n $dry_run ]]; then
        print_sweep
        exit
    fi
    check_in_python
    ((${#notes[@]} == 0)) || printf '%s\n' "${notes[@]}"
    if [[ -n $slurm ]]; then
        submit
    else
        run_here
    fi
}

main; exit # on one line: bash reads a script as it goes, and this one may be edited while a sweep runs
