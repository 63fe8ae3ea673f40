sh check.sh >/dev/null 2>&1
cp backup/mast.dat parts/mast.dat
sh check.sh && echo Restored.
