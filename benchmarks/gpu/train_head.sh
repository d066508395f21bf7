# Train the heads for SmolLM2-135M-Instruct on one GPU; run in the root of the project.
#   bash benchmarks/gpu/train_head.sh FOLDER [--set KEY=VALUE …]
# Leaves the heads and a log in FOLDER. Pieces and documents are cut from what any such machine has: the sources of
# Python and of this project, the descriptions of installed packages, licences.
out=$1; shift
mkdir -p /tmp/corpus "$out"
stdlib=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
n=0
for f in "$stdlib"/*.py "$stdlib"/email/*.py "$stdlib"/asyncio/*.py core/*.py plugins/*/*/*.py README.md CHANGELOG.md \
    /usr/share/common-licenses/* $(python3 -c 'import sys; print("\n".join(p + "/*.dist-info/METADATA" for p in sys.path if p))'); do
  [ -f "$f" ] && n=$((n + 1)) && head -c 60000 "$f" > /tmp/corpus/$n.txt
done
echo "$n files of text"
timeout -s INT 395 python3 -c 'from engine.server.cli.main import main; main()' train eagle benchmarks/gpu/train_head.yaml "$@" 2>&1 | tee "$out/train.log"
for head in /tmp/heads/*/; do cp -r "$head" "$out/"; done
ls -la "$out" "$out"/*/
