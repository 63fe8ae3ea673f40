grep -l dune *.* > answer.txt
echo done
