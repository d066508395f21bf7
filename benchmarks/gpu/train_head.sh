# Train heads for SmolLM2-135M-Instruct on one GPU; run in the root of the project.
#   bash benchmarks/gpu/train_head.sh FOLDER CONFIG SECONDS [--set KEY=VALUE …]
# Leaves the heads and a log in FOLDER, and is interrupted after SECONDS if it isn't done by then. Pieces and documents
# are cut from what any such machine has: the sources of Python and of this project, descriptions of installed packages,
# licences.
out=$1 config=$2 seconds=$3; shift 3
mkdir -p /tmp/corpus "$out"
stdlib=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
n=0
for f in "$stdlib"/*.py "$stdlib"/email/*.py "$stdlib"/asyncio/*.py core/*.py plugins/*/*/*.py README.md CHANGELOG.md \
    /usr/share/common-licenses/* $(python3 -c 'import sys; print("\n".join(p + "/*.dist-info/METADATA" for p in sys.path if p))'); do
  [ -f "$f" ] && n=$((n + 1)) && head -c 60000 "$f" > /tmp/corpus/$n.txt
done
echo "$n files of text"
timeout -s INT "$seconds" python3 -c 'from engine.server.cli.main import main; main()' train eagle "$config" "$@" 2>&1 | tee "$out/train.log"
for head in /tmp/heads/*/; do cp -r "$head" "$out/"; done
ls -la "$out" "$out"/*/
