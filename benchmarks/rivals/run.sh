#!/bin/sh
# Makes a virtual environment for each rival, installs it, runs its script.
#
#   benchmarks/rivals/run.sh [FOLDER]
#
# FOLDER, outside the repository, keeps the environments for the next run; without it they are made in a temporary
# folder and deleted. PYTHON names the interpreter.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
if [ $# -gt 0 ]; then
    mkdir -p "$1"
    folder=$(cd "$1" && pwd)
else
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
case "$folder/" in
"$repository"/*)
    rmdir "$folder" 2>/dev/null || true
    echo "$folder is inside the repository" >&2
    exit 1
    ;;
esac

export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false LANGSMITH_TRACING=false
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Pinned, so that nothing replaces it: a looser range may bring in gigabytes of GPU libraries.
torch=torch==2.13.0
echo "$torch" >"$folder/constraints.txt"

# rival SCRIPT PACKAGE...
rival() {
    script=$1
    shift
    environment=$folder/${script%.py}
    if [ ! -e "$environment/.ready" ]; then
        ${PYTHON:-python3} -m venv "$environment" || return 1
        case $1 in torch*) "$environment/bin/pip" install --quiet "$1" >&2 || return 1 ;; esac
        "$environment/bin/pip" install --quiet --constraint "$folder/constraints.txt" "$@" >&2 || return 1
        touch "$environment/.ready"
    fi
    "$environment/bin/python" -W ignore "$here/$script" || return 1
    echo
}

# One rival that cannot be installed does not stop the others. langchain-huggingface needs huggingface-hub below 2.
status=0
rival chat_huggingface.py $torch "langchain-huggingface==1.2.3" "langchain-core==1.8.3" "transformers==5.24.0" || status=1
rival huggingface_llm.py $torch "llama-index-core==0.14.25" "transformers==5.24.0" \
    "llama-index-llms-huggingface==0.8.0" || status=1
rival chat_ollama.py "langchain-ollama==1.1.0" "langchain-core==1.8.3" "ollama==0.6.3" || status=1
rival chat_llama_cpp.py "langchain-community==0.4.2" "langchain-core==1.8.3" || status=1

if "$folder/chat_llama_cpp/bin/pip" download --quiet --only-binary :all: --no-deps --dest "$folder/wheels" \
    llama-cpp-python >/dev/null 2>&1; then
    echo "llama-cpp-python has a wheel: ChatLlamaCpp could be run over the real library"
else
    echo "llama-cpp-python has no wheel: ChatLlamaCpp was run over a stand-in"
fi
exit $status
