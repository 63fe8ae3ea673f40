echo 'dune raven' > juniper.txt
echo done
