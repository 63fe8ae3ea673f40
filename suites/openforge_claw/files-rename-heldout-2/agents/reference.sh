mv heron.md nickel.log
echo done
